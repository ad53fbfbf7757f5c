//! Random numbers of the kernel.

use rustix::rand::GetRandomFlags;

use crate::{Error, Result};

/// At most 256 bytes that cannot be guessed: so few come whole (getrandom(2)).
pub fn bytes<const N: usize>() -> Result<[u8; N]> {
    const { assert!(N <= 256) };
    let mut bytes = [0; N];
    rustix::rand::getrandom(bytes.as_mut_slice(), GetRandomFlags::empty())
        .map_err(|errno| Error::new("getrandom", format_args!("{N} bytes"), errno))?;
    Ok(bytes)
}

/// 32 hexadecimal digits that cannot be guessed.
pub fn hexadecimal() -> Result<String> {
    Ok(format!("{:032x}", u128::from_ne_bytes(bytes()?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_all_their_digits_and_are_not_equal() {
        let numbers: std::collections::BTreeSet<String> = (0..100).map(|_| hexadecimal().unwrap()).collect();
        assert_eq!(numbers.len(), 100);
        assert!(numbers.iter().all(|number| number.len() == 32), "{numbers:?}");
    }
}
