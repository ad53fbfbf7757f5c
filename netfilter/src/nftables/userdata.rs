//! The data that user space stores with a table, chain or rule: type, length and value; type and
//! length have one byte each. The comment has type 0 in all three, and ends with a zero byte
//! (libnftnl `udata.h`).

const COMMENT: u8 = 0;
/// Our own type, far above libnftnl's numbers: nft ignores unknown types.
const TAG: u8 = 0xca;

/// The length is one byte, and counts the final zero.
pub(super) const COMMENT_MAX: usize = 254;

/// Limit of all data together (`NFT_USERDATA_MAXLEN`).
pub(super) const MAX: usize = 256;

pub(super) fn comment(text: &str) -> Vec<u8> {
    let bytes = text.as_bytes();
    let kept = &bytes[..bytes.len().min(COMMENT_MAX)];
    let length = u8::try_from(kept.len() + 1).unwrap_or(u8::MAX);
    [&[COMMENT, length], kept, &[0]].concat()
}

/// A tag of at most 255 bytes.
pub(super) fn tag(bytes: &[u8]) -> Vec<u8> {
    let kept = &bytes[..bytes.len().min(255)];
    [&[TAG, u8::try_from(kept.len()).unwrap_or(u8::MAX)], kept].concat()
}

pub(super) fn find_comment(userdata: &[u8]) -> Option<String> {
    find(userdata, COMMENT).map(crate::attributes::text)
}

pub(super) fn find_tag(userdata: &[u8]) -> Option<Vec<u8>> {
    find(userdata, TAG).map(<[u8]>::to_vec)
}

fn find(mut userdata: &[u8], wanted: u8) -> Option<&[u8]> {
    while let [kind, length, rest @ ..] = userdata {
        let (value, rest) = rest.split_at_checked(usize::from(*length))?;
        if *kind == wanted {
            return Some(value);
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

    #[test]
    fn a_tag_stands_beside_the_comment() {
        let both = [comment("cid"), tag(b"net eth0")].concat();
        assert_eq!(find_comment(&both), Some("cid".to_owned()));
        assert_eq!(find_tag(&both), Some(b"net eth0".to_vec()));
        assert_eq!(find_tag(&comment("cid")), None);
    }
}
