//! The digest in the reference's names of chains and comments.

use sha2::{Digest, Sha512};

/// The first `digits` hexadecimal digits (at most 128, lower case) of `text`'s SHA-512.
pub fn sha512_hex(text: &str, digits: usize) -> String {
    let mut hex = base16ct::lower::encode_string(&Sha512::digest(text.as_bytes()));
    hex.truncate(digits);
    hex
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_the_first_ones() {
        // NIST's example for "abc".
        assert_eq!(sha512_hex("abc", 24), "ddaf35a193617abacc417349");
        assert_eq!(sha512_hex("abc", 128).len(), 128);
    }
}
