//! What a client sends before h2 sees it.

use super::authority::AuthorityRewriter;
use super::hpack::{self, Decoder};

/// Header blocks of one connection, each behind a byte with its length. What is decoded is the
/// same after it was encoded.
pub fn header_blocks(mut input: &[u8]) {
    let mut decoder = Decoder::default();
    while let Some((length, rest)) = input.split_first() {
        let (block, rest) = rest.split_at(rest.len().min((*length).into()));
        input = rest;
        let Ok(fields) = decoder.decode(block) else { return };
        let again = Decoder::default().decode(&hpack::encode_literals(&fields));
        assert_eq!(again.as_ref(), Ok(&fields));
    }
}

/// The bytes of a connection behind its preface. They are rewritten in the same way however
/// they arrive, and what was rewritten stays as it is.
pub fn frames(input: &[u8]) {
    let connection = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", input].concat();
    let whole = rewritten(connection.chunks(usize::MAX));
    assert_eq!(whole, rewritten(connection.chunks(1)));
    if let Some(once) = whole {
        assert_eq!(rewritten([&once[..]]), Some(once));
    }
}

/// What h2 gets; nothing if the connection is broken.
fn rewritten<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Option<Vec<u8>> {
    let (mut rewriter, mut out) = (AuthorityRewriter::new(), Vec::new());
    for piece in pieces {
        rewriter.feed(piece, &mut out).ok()?;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use tests::seeds;

    #[test]
    fn seeds_of_header_blocks_hold() {
        seeds::run("header_blocks", super::header_blocks);
    }

    #[test]
    fn seeds_of_frames_hold() {
        seeds::run("frames", super::frames);
    }
}
