//! Layers that are compressed with zstd (RFC 8878): all frames of a stream, one after the other.
//!
//! Frames that hold no data (skippable ones) are left out; images in the forms of estargz and
//! zstd:chunked have them. A frame's own checksum is not checked: the blob's digest covers it.

use std::io::{self, BufRead, Read};

use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

const MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// Of the first kind of skippable frames; there are sixteen.
const SKIPPABLE: u32 = 0x184d_2a50;

pub(crate) fn is_start(bytes: &[u8]) -> bool {
    let Some(first) = bytes.first_chunk::<4>() else { return false };
    *first == MAGIC || u32::from_le_bytes(*first) & !0xf == SKIPPABLE
}

/// The content of all frames of `R`. Windows of more than 128 MiB are refused.
pub(crate) struct Frames<R> {
    source: R,
    decoder: FrameDecoder,
}

impl<R: BufRead> Frames<R> {
    pub(crate) fn new(source: R) -> Self {
        Self { source, decoder: FrameDecoder::new() }
    }

    /// Reads the head of the next frame with data. False at the end of the stream.
    fn begin(&mut self) -> io::Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            let length = match self.decoder.reset(&mut self.source) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => u64::from(length),
                Err(error) => return Err(io::Error::other(error)),
            };
            if io::copy(&mut self.source.by_ref().take(length), &mut io::sink())? < length {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(false)
    }
}

impl<R: BufRead> Read for Frames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.decoder.can_collect() == 0 {
            if self.decoder.is_finished() {
                if !self.begin()? {
                    return Ok(0);
                }
            } else {
                self.decoder
                    .decode_blocks(&mut self.source, BlockDecodingStrategy::UptoBlocks(1))
                    .map_err(io::Error::other)?;
            }
        }
        self.decoder.read(buffer)
    }
}

#[cfg(test)]
mod tests {
    use ruzstd::encoding::{CompressionLevel, compress_to_vec};

    use super::*;

    fn frame(content: &[u8]) -> Vec<u8> {
        compress_to_vec(content, CompressionLevel::Fastest)
    }

    fn skippable(content: &[u8]) -> Vec<u8> {
        let length = u32::try_from(content.len()).unwrap();
        [&0x184d_2a5e_u32.to_le_bytes(), &length.to_le_bytes(), content].concat()
    }

    fn read(stream: &[u8]) -> io::Result<Vec<u8>> {
        assert!(is_start(stream));
        let mut content = Vec::new();
        Frames::new(stream).read_to_end(&mut content).map(|_| content)
    }

    #[test]
    fn all_frames_are_read_and_those_without_data_left_out() {
        let large = vec![7; 300_000];
        let stream =
            [skippable(b"a"), frame(b"one "), skippable(b""), frame(&large), frame(b""), skippable(b"b")];
        assert_eq!(read(&stream.concat()).unwrap(), [b"one ".as_slice(), &large].concat());
    }

    #[test]
    fn a_stream_that_ends_early_or_goes_on_with_something_else_is_an_error() {
        let whole = frame(&b"content".repeat(1000));
        for cut in [5, 8, whole.len() - 1] {
            read(&whole[..cut]).unwrap_err();
        }
        read(&skippable(b"abc")[..9]).unwrap_err();
        let error = read(&[whole.as_slice(), b"rest"].concat()).unwrap_err().to_string();
        assert!(error.to_lowercase().contains("magic"), "{error}");
    }
}
