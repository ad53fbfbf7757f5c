//! Netlink attributes: length, type, value, padded to four bytes. The value of a nested one
//! consists of attributes (`include/uapi/linux/netlink.h`). netfilter's numbers are in network
//! order.

const HEADER: usize = 4;
/// Marks an attribute whose value is attributes.
const NESTED: u16 = 0x8000;
/// The type without this flag and the byte-order flag.
const TYPE_MASK: u16 = 0x3fff;

/// Appends an attribute. A value of 64 KiB or more exceeds the length field: it is truncated, and
/// the kernel refuses it.
pub(crate) fn put(bytes: &mut Vec<u8>, kind: u16, value: &[u8]) {
    nest_as(bytes, kind, |bytes| {
        bytes.extend_from_slice(value.get(..usize::from(u16::MAX) - HEADER).unwrap_or(value));
    });
}

pub(crate) fn put_u32(bytes: &mut Vec<u8>, kind: u16, value: u32) {
    put(bytes, kind, &value.to_be_bytes());
}

pub(crate) fn put_u64(bytes: &mut Vec<u8>, kind: u16, value: u64) {
    put(bytes, kind, &value.to_be_bytes());
}

/// Appends a text with a final zero.
pub(crate) fn put_text(bytes: &mut Vec<u8>, kind: u16, text: &str) {
    nest_as(bytes, kind, |bytes| {
        bytes.extend_from_slice(text.as_bytes());
        bytes.push(0);
    });
}

/// Appends an attribute that contains the attributes of `inner`.
pub(crate) fn nest(bytes: &mut Vec<u8>, kind: u16, inner: impl FnOnce(&mut Vec<u8>)) {
    nest_as(bytes, kind | NESTED, inner);
}

fn nest_as(bytes: &mut Vec<u8>, kind: u16, inner: impl FnOnce(&mut Vec<u8>)) {
    let start = bytes.len();
    bytes.extend([0; 2]);
    bytes.extend(kind.to_ne_bytes());
    inner(bytes);
    let length = u16::try_from(bytes.len() - start).unwrap_or(u16::MAX);
    bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
    bytes.resize(start + (bytes.len() - start).next_multiple_of(4), 0);
}

/// Types and values in their order; stops at a torn attribute.
pub(crate) fn each(mut attributes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (header, _) = attributes.split_first_chunk::<HEADER>()?;
        let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        let value = attributes.get(HEADER..length)?;
        attributes = attributes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes([header[2], header[3]]) & TYPE_MASK, value))
    })
}

pub(crate) fn find(attributes: &[u8], kind: u16) -> Option<&[u8]> {
    each(attributes).find_map(|(found, value)| (found == kind).then_some(value))
}

pub(crate) fn find_u32(attributes: &[u8], kind: u16) -> Option<u32> {
    find(attributes, kind)?.first_chunk().map(|value| u32::from_be_bytes(*value))
}

pub(crate) fn find_u64(attributes: &[u8], kind: u16) -> Option<u64> {
    find(attributes, kind)?.first_chunk().map(|value| u64::from_be_bytes(*value))
}

pub(crate) fn find_text(attributes: &[u8], kind: u16) -> Option<String> {
    find(attributes, kind).map(text)
}

/// A string, with or without its final zero.
pub(crate) fn text(value: &[u8]) -> String {
    let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
    String::from_utf8_lossy(&value[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_nested_and_found() {
        let mut bytes = Vec::new();
        put_text(&mut bytes, 1, "name");
        nest(&mut bytes, 2, |bytes| {
            put_u32(bytes, 1, 7);
            put_u64(bytes, 2, 8);
        });
        put(&mut bytes, 3, b"x");
        assert_eq!(bytes.len() % 4, 0);
        assert_eq!(find_text(&bytes, 1).as_deref(), Some("name"));
        let inner = find(&bytes, 2).unwrap();
        assert_eq!((find_u32(inner, 1), find_u64(inner, 2)), (Some(7), Some(8)));
        assert_eq!(find(&bytes, 3), Some(&b"x"[..]));
        assert_eq!(find(&bytes, 4), None);
        for length in 0..bytes.len() {
            assert!(each(&bytes[..length]).count() < 3 || length > bytes.len() - 4);
        }
    }

    #[test]
    fn lengths_that_lie_end_the_list() {
        assert_eq!(each(&[0; 16]).count(), 0);
        assert_eq!(each(&[3, 0, 1, 0]).count(), 0);
        assert_eq!(each(&[0xff, 0xff, 1, 0, 9]).count(), 0);
    }

    #[test]
    fn what_is_too_long_is_cut_to_what_the_length_can_say() {
        let mut bytes = Vec::new();
        put(&mut bytes, 1, &[1; 70_000]);
        assert_eq!(each(&bytes).map(|(_, value)| value.len()).collect::<Vec<_>>(), [0xffff - HEADER]);
    }
}
