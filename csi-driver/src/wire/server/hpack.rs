//! Header blocks (RFC 7541): a full decoder, and an encoder that writes literals only.
//!
//! A decoder holds the state of one direction of one connection. It must see every block, in order;
//! otherwise its dynamic table is wrong.

use std::collections::VecDeque;

use super::huffman;

/// The default that our side implies: SETTINGS_HEADER_TABLE_SIZE's initial value (RFC 9113, 6.5.2).
const MAX_TABLE_BYTES: usize = 4096;
/// Largest decoded list, counted as in RFC 7541 (name, value and 32 for each field). Without a
/// limit, a small block that refers to one large entry many times would grow by a factor of a
/// thousand.
const MAX_LIST_BYTES: usize = 64 * 1024;
const FIELD_OVERHEAD: usize = 32;

/// A name and a value, without an encoding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Field {
    pub(super) name: Vec<u8>,
    pub(super) value: Vec<u8>,
}

impl Field {
    fn size(&self) -> usize {
        self.name.len() + self.value.len() + FIELD_OVERHEAD
    }
}

/// A decoding error of RFC 7541; the connection cannot be used after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum HpackError {
    #[error("header block ends within a field")]
    Truncated,
    #[error("integer out of range")]
    Integer,
    #[error("no table entry of that index")]
    Index,
    #[error("malformed Huffman code")]
    Huffman,
    #[error("table size update out of place or above {MAX_TABLE_BYTES} bytes")]
    TableSize,
    #[error("header list above {MAX_LIST_BYTES} bytes")]
    ListTooLarge,
}

#[derive(Debug)]
pub(super) struct Decoder {
    /// Newest first, as indices count.
    entries: VecDeque<Field>,
    entry_bytes: usize,
    max_bytes: usize,
}

impl Default for Decoder {
    fn default() -> Self {
        Self { entries: VecDeque::new(), entry_bytes: 0, max_bytes: MAX_TABLE_BYTES }
    }
}

impl Decoder {
    /// The fields of one whole block (HEADERS and its CONTINUATIONs joined).
    pub(super) fn decode(&mut self, block: &[u8]) -> Result<Vec<Field>, HpackError> {
        let mut input = Reader { rest: block };
        let mut fields = Vec::new();
        let mut list_bytes = 0;
        while let Some(first) = input.peek() {
            let field = match first {
                0x80.. => self.indexed(input.integer(7)?)?,
                0x40.. => {
                    let field = self.literal(&mut input, 6)?;
                    self.insert(field.clone());
                    field
                }
                0x20.. => {
                    // Section 4.2: only at the beginning of a block.
                    let size = input.integer(5)?;
                    if !fields.is_empty() || size > MAX_TABLE_BYTES {
                        return Err(HpackError::TableSize);
                    }
                    self.max_bytes = size;
                    self.evict();
                    continue;
                }
                _ => self.literal(&mut input, 4)?,
            };
            list_bytes += field.size();
            if list_bytes > MAX_LIST_BYTES {
                return Err(HpackError::ListTooLarge);
            }
            fields.push(field);
        }
        Ok(fields)
    }

    fn indexed(&self, index: usize) -> Result<Field, HpackError> {
        let position = index.checked_sub(1).ok_or(HpackError::Index)?;
        match STATIC_TABLE.get(position) {
            Some((name, value)) => Ok(Field { name: name.as_bytes().into(), value: value.as_bytes().into() }),
            None => self.entries.get(position - STATIC_TABLE.len()).cloned().ok_or(HpackError::Index),
        }
    }

    fn literal(&self, input: &mut Reader<'_>, prefix_bits: u32) -> Result<Field, HpackError> {
        let name = match input.integer(prefix_bits)? {
            0 => input.string()?,
            index => self.indexed(index)?.name,
        };
        Ok(Field { name, value: input.string()? })
    }

    /// Section 4.4: an entry larger than the table empties it, and is no error.
    fn insert(&mut self, field: Field) {
        self.entry_bytes += field.size();
        self.entries.push_front(field);
        self.evict();
    }

    fn evict(&mut self) {
        while self.entry_bytes > self.max_bytes {
            let Some(oldest) = self.entries.pop_back() else { break };
            self.entry_bytes -= oldest.size();
        }
    }
}

/// A block of literals without indexing and without Huffman code: every decoder accepts it in any
/// state, and it leaves no entry in the table.
pub(super) fn encode_literals(fields: &[Field]) -> Vec<u8> {
    let mut block = Vec::new();
    for field in fields {
        block.push(0);
        put_string(&mut block, &field.name);
        put_string(&mut block, &field.value);
    }
    block
}

fn put_string(block: &mut Vec<u8>, text: &[u8]) {
    let prefix_max = 0x7f;
    match u8::try_from(text.len()) {
        Ok(short) if short < prefix_max => block.push(short),
        _ => {
            block.push(prefix_max);
            let mut rest = text.len() - usize::from(prefix_max);
            while rest >= 0x80 {
                block.push(low_seven_bits(rest) | 0x80);
                rest >>= 7;
            }
            block.push(low_seven_bits(rest));
        }
    }
    block.extend_from_slice(text);
}

fn low_seven_bits(value: usize) -> u8 {
    u8::try_from(value & 0x7f).expect("seven bits fit into eight")
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl Reader<'_> {
    fn peek(&self) -> Option<u8> {
        self.rest.first().copied()
    }

    fn byte(&mut self) -> Result<u8, HpackError> {
        let (first, rest) = self.rest.split_first().ok_or(HpackError::Truncated)?;
        self.rest = rest;
        Ok(*first)
    }

    /// Section 5.1. Four bytes after the prefix reach 2^28, beyond any limit here.
    fn integer(&mut self, prefix_bits: u32) -> Result<usize, HpackError> {
        let mask = (1u8 << prefix_bits) - 1;
        let first = self.byte()? & mask;
        let mut value = usize::from(first);
        if first < mask {
            return Ok(value);
        }
        for shift in [0, 7, 14, 21] {
            let byte = self.byte()?;
            value += usize::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(HpackError::Integer)
    }

    fn string(&mut self) -> Result<Vec<u8>, HpackError> {
        let is_huffman = self.peek().ok_or(HpackError::Truncated)? & 0x80 != 0;
        let length = self.integer(7)?;
        let (text, rest) = self.rest.split_at_checked(length).ok_or(HpackError::Truncated)?;
        self.rest = rest;
        if is_huffman { huffman::decode(text).ok_or(HpackError::Huffman) } else { Ok(text.into()) }
    }
}

/// RFC 7541, appendix A; index 1 first.
const STATIC_TABLE: [(&str, &str); 61] = [
    (":authority", ""),
    (":method", "GET"),
    (":method", "POST"),
    (":path", "/"),
    (":path", "/index.html"),
    (":scheme", "http"),
    (":scheme", "https"),
    (":status", "200"),
    (":status", "204"),
    (":status", "206"),
    (":status", "304"),
    (":status", "400"),
    (":status", "404"),
    (":status", "500"),
    ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"),
    ("accept-language", ""),
    ("accept-ranges", ""),
    ("accept", ""),
    ("access-control-allow-origin", ""),
    ("age", ""),
    ("allow", ""),
    ("authorization", ""),
    ("cache-control", ""),
    ("content-disposition", ""),
    ("content-encoding", ""),
    ("content-language", ""),
    ("content-length", ""),
    ("content-location", ""),
    ("content-range", ""),
    ("content-type", ""),
    ("cookie", ""),
    ("date", ""),
    ("etag", ""),
    ("expect", ""),
    ("expires", ""),
    ("from", ""),
    ("host", ""),
    ("if-match", ""),
    ("if-modified-since", ""),
    ("if-none-match", ""),
    ("if-range", ""),
    ("if-unmodified-since", ""),
    ("last-modified", ""),
    ("link", ""),
    ("location", ""),
    ("max-forwards", ""),
    ("proxy-authenticate", ""),
    ("proxy-authorization", ""),
    ("range", ""),
    ("referer", ""),
    ("refresh", ""),
    ("retry-after", ""),
    ("server", ""),
    ("set-cookie", ""),
    ("strict-transport-security", ""),
    ("transfer-encoding", ""),
    ("user-agent", ""),
    ("vary", ""),
    ("via", ""),
    ("www-authenticate", ""),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        let digits: String = text.split_whitespace().collect();
        (0..digits.len()).step_by(2).map(|i| u8::from_str_radix(&digits[i..i + 2], 16).unwrap()).collect()
    }

    fn shown(fields: &[Field]) -> Vec<String> {
        let text = |b: &[u8]| String::from_utf8_lossy(b).into_owned();
        fields.iter().map(|f| format!("{}: {}", text(&f.name), text(&f.value))).collect()
    }

    /// RFC 7541, C.3 (plain) and C.4 (Huffman): three requests on one connection.
    #[test]
    fn the_requests_of_rfc_7541_appendix_c_are_decoded() {
        let plain = [
            "8286 8441 0f77 7777 2e65 7861 6d70 6c65 2e63 6f6d",
            "8286 84be 5808 6e6f 2d63 6163 6865",
            "8287 85bf 400a 6375 7374 6f6d 2d6b 6579 0c63 7573 746f 6d2d 7661 6c75 65",
        ];
        let huffman = [
            "8286 8441 8cf1 e3c2 e5f2 3a6b a0ab 90f4 ff",
            "8286 84be 5886 a8eb 1064 9cbf",
            "8287 85bf 4088 25a8 49e9 5ba9 7d7f 8925 a849 e95b b8e8 b4bf",
        ];
        for blocks in [plain, huffman] {
            let mut decoder = Decoder::default();
            let first = decoder.decode(&hex(blocks[0])).unwrap();
            assert_eq!(
                shown(&first),
                [":method: GET", ":scheme: http", ":path: /", ":authority: www.example.com"]
            );
            let second = decoder.decode(&hex(blocks[1])).unwrap();
            assert_eq!(shown(&second)[3..], [":authority: www.example.com", "cache-control: no-cache"]);
            let third = decoder.decode(&hex(blocks[2])).unwrap();
            assert_eq!(shown(&third)[3..], [":authority: www.example.com", "custom-key: custom-value"]);
            assert_eq!(decoder.entry_bytes, 164, "the table size that the RFC states");
        }
    }

    /// RFC 7541, C.5: responses with a table of 256 bytes, so that entries leave it.
    #[test]
    fn entries_leave_a_full_table_oldest_first() {
        let mut decoder = Decoder::default();
        decoder.decode(&hex("3f e1 01")).unwrap();
        assert_eq!(decoder.max_bytes, 256);
        for block in [
            "4803 3330 3258 0770 7269 7661 7465 611d 4d6f 6e2c 2032 3120 4f63 7420 3230 3133 2032 303a 3133 \
             3a32 3120 474d 546e 1768 7474 7073 3a2f 2f77 7777 2e65 7861 6d70 6c65 2e63 6f6d",
            "4803 3330 37c1 c0bf",
        ] {
            let fields = decoder.decode(&hex(block)).unwrap();
            assert_eq!(shown(&fields)[1], "cache-control: private");
        }
        assert_eq!(decoder.entry_bytes, 222);
        assert_eq!(shown(&[decoder.indexed(62).unwrap()]), [":status: 307"]);
        assert_eq!(decoder.indexed(66), Err(HpackError::Index));
    }

    #[test]
    fn what_is_encoded_is_decoded_again() {
        let fields: Vec<Field> = [0, 1, 126, 127, 128, 5000]
            .into_iter()
            .map(|length| Field { name: b"x-name".to_vec(), value: vec![b'v'; length] })
            .collect();
        let mut decoder = Decoder::default();
        assert_eq!(decoder.decode(&encode_literals(&fields)).unwrap(), fields);
        assert_eq!(decoder.entry_bytes, 0);
    }

    #[test]
    fn malformed_blocks_are_refused_each_with_its_reason() {
        for (block, reason) in [
            (&[0x80][..], HpackError::Index),
            (&[0xff, 0xff, 0xff, 0xff, 0x7f], HpackError::Index),
            (&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01], HpackError::Integer),
            (&[0xff], HpackError::Truncated),
            (&[0x00, 0x05, b'a'], HpackError::Truncated),
            (&[0x00], HpackError::Truncated),
            (&[0x00, 0x81, 0x00], HpackError::Huffman),
            (&[0x3f, 0xff, 0xff, 0x03], HpackError::TableSize),
            (&[0x82, 0x20], HpackError::TableSize),
        ] {
            assert_eq!(Decoder::default().decode(block), Err(reason), "{block:02x?}");
        }
    }

    #[test]
    fn a_small_block_that_grows_beyond_the_limit_is_refused() {
        let mut block = vec![0x40, 0x01, b'n', 0x7f, 0xa1, 0x1e];
        block.extend(std::iter::repeat_n(b'v', 4000));
        block.extend(std::iter::repeat_n(0xbe, 100));
        assert_eq!(Decoder::default().decode(&block), Err(HpackError::ListTooLarge));
    }

    /// Every prefix and every single-byte change of a true block ends in fields or in an error.
    #[test]
    fn no_block_makes_the_decoder_panic() {
        let block = hex("3fe1 01 8287 85bf 4088 25a8 49e9 5ba9 7d7f 8925 a849 e95b b8e8 b4bf 0f1f 0161");
        for end in 0..block.len() {
            drop(Decoder::default().decode(&block[..end]));
        }
        for position in 0..block.len() {
            for byte in 0..=255 {
                let mut changed = block.clone();
                changed[position] = byte;
                drop(Decoder::default().decode(&changed));
            }
        }
    }
}
