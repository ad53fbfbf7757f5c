//! HPACK's Huffman code (RFC 7541, section 5.2 and appendix B), decoding only.
//!
//! The code is canonical: within one length, codes ascend with the symbol, and
//! the first code of a length follows from the last of the length before. So
//! the lengths alone are the table.

const SYMBOLS: usize = 257;
const EOS: u16 = 256;
const MAX_BITS: usize = 30;

/// Bits of each symbol's code, by symbol; the last is EOS (RFC 7541, appendix B).
#[rustfmt::skip]
const LENGTHS: [u8; SYMBOLS] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28,
    28, 28, 28, 28, 28, 28, 28, 28, 6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6,
    5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10, 13, 6, 7, 7, 7, 7, 7, 7,
    7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6,
    15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7,
    7, 7, 7, 15, 11, 14, 13, 28, 20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23,
    24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24, 22, 21, 20, 22, 22, 23, 23, 21,
    23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24,
    21, 21, 26, 26, 28, 27, 27, 27, 20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23,
    26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26, 30,
];

/// Per code length: the first code, how many there are, and where their symbols start in `symbols`.
struct Canonical {
    first_code: [u32; MAX_BITS + 1],
    count: [u16; MAX_BITS + 1],
    offset: [u16; MAX_BITS + 1],
    symbols: [u16; SYMBOLS],
}

static TABLE: Canonical = build();

const fn build() -> Canonical {
    let mut table = Canonical {
        first_code: [0; MAX_BITS + 1],
        count: [0; MAX_BITS + 1],
        offset: [0; MAX_BITS + 1],
        symbols: [0; SYMBOLS],
    };
    let mut code: u32 = 0;
    let mut filled: u16 = 0;
    let mut bits = 1;
    while bits <= MAX_BITS {
        code <<= 1;
        table.first_code[bits] = code;
        table.offset[bits] = filled;
        let mut symbol: u16 = 0;
        while (symbol as usize) < SYMBOLS {
            if LENGTHS[symbol as usize] as usize == bits {
                table.symbols[filled as usize] = symbol;
                filled += 1;
                table.count[bits] += 1;
                code += 1;
            }
            symbol += 1;
        }
        bits += 1;
    }
    table
}

/// `None` for a text that no encoder writes: an unknown code, an EOS, or padding that is longer
/// than seven bits or not all ones (RFC 7541, section 5.2).
pub(super) fn decode(input: &[u8]) -> Option<Vec<u8>> {
    // The shortest code has five bits.
    let mut text = Vec::with_capacity(input.len() * 8 / 5);
    let mut code: u32 = 0;
    let mut bits = 0;
    for byte in input {
        for shift in (0..8).rev() {
            code = code << 1 | u32::from(byte >> shift & 1);
            bits += 1;
            if bits > MAX_BITS {
                return None;
            }
            let index = code.wrapping_sub(TABLE.first_code[bits]);
            if code < TABLE.first_code[bits] || index >= u32::from(TABLE.count[bits]) {
                continue;
            }
            let symbol = TABLE.symbols[usize::from(TABLE.offset[bits]) + usize::try_from(index).ok()?];
            if symbol == EOS {
                return None;
            }
            text.push(u8::try_from(symbol).ok()?);
            (code, bits) = (0, 0);
        }
    }
    let padding_is_ones = code == (1 << bits) - 1;
    (bits < 8 && padding_is_ones).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        let digits: String = text.split_whitespace().collect();
        (0..digits.len()).step_by(2).map(|i| u8::from_str_radix(&digits[i..i + 2], 16).unwrap()).collect()
    }

    #[test]
    fn the_code_is_complete() {
        // Kraft's equality: every string of bits is a sequence of codes.
        let sum: u64 = LENGTHS.iter().map(|l| 1u64 << (MAX_BITS - usize::from(*l))).sum();
        assert_eq!(sum, 1 << MAX_BITS);
    }

    #[test]
    fn the_strings_of_rfc_7541_appendix_c_are_decoded() {
        for (coded, text) in [
            ("f1e3 c2e5 f23a 6ba0 ab90 f4ff", "www.example.com"),
            ("a8eb 1064 9cbf", "no-cache"),
            ("25a8 49e9 5ba9 7d7f", "custom-key"),
            ("25a8 49e9 5bb8 e8b4 bf", "custom-value"),
            ("6402", "302"),
            ("aec3 771a 4b", "private"),
            ("d07a be94 1054 d444 a820 0595 040b 8166 e082 a62d 1bff", "Mon, 21 Oct 2013 20:13:21 GMT"),
            ("9d29 ad17 1863 c78f 0b97 c8e9 ae82 ae43 d3", "https://www.example.com"),
            ("9bd9 ab", "gzip"),
            (
                "94e7 821d d7f2 e6c7 b335 dfdf cd5b 3960 d5af 2708 7f36 72c1 ab27 0fb5 291f 9587 3160 65c0 03ed \
                 4ee5 b106 3d50 07",
                "foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1",
            ),
        ] {
            assert_eq!(decode(&hex(coded)).as_deref(), Some(text.as_bytes()), "{coded}");
        }
    }

    #[test]
    fn wrong_padding_and_an_explicit_end_are_refused() {
        assert_eq!(decode(&[0b0000_0000]), None, "padded with zeros");
        assert_eq!(decode(&[0b0001_1111, 0xff]), None, "padded with more than seven bits");
        assert_eq!(decode(&[0xff, 0xff, 0xff, 0xff]), None, "EOS");
    }
}
