//! What user space keeps with a table, chain or rule: type, length, value, a
//! byte each for the first two. The comment is type 0 in all three, and ends
//! with a zero byte (libnftnl `udata.h`).

const COMMENT: u8 = 0;

/// The length is one byte, and counts the final zero.
pub(super) const COMMENT_MAX: usize = 254;

pub(super) fn comment(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes();
    let kept = &bytes[..bytes.len().min(COMMENT_MAX)];
    let length = u8::try_from(kept.len() + 1).unwrap_or(u8::MAX);
    [&[COMMENT, length], kept, &[0]].concat()
}

pub(super) fn find_comment(mut userdata: &[u8]) -> Option<String> {
    while let [kind, length, rest @ ..] = userdata {
        let (value, rest) = rest.split_at_checked(usize::from(*length))?;
        if *kind == COMMENT {
            return Some(super::expression::text(value));
        }
        userdata = rest;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_comment_is_found_behind_other_data() {
        assert_eq!(comment("cid"), b"\x00\x04cid\x00");
        assert_eq!(find_comment(b"\x00\x04cid\x00"), Some("cid".to_owned()));
        assert_eq!(find_comment(b"\x01\x01x\x00\x04cid\x00"), Some("cid".to_owned()));
        assert_eq!(find_comment(b"\x01\x01x"), None);
        assert_eq!(find_comment(b"\x00\x09cid\x00"), None, "torn");
        assert_eq!(find_comment(&comment(&"x".repeat(300))), Some("x".repeat(COMMENT_MAX)));
    }
}
