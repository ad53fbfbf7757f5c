//! Header blocks: pairs of names and values, compressed by zlib with a dictionary that both sides know.
//! All blocks of one direction are one zlib stream.

use std::io;

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};

use super::Problem;

/// Names in lower case, with their values.
pub(in crate::server::streaming) type Headers = Vec<(String, String)>;

const MOST_BYTES: usize = 64 << 10;
const MOST_HEADERS: u32 = 100;

/// Words of the dictionary that have their length before them.
const WORDS: [&str; 65] = [
    "options",
    "head",
    "post",
    "put",
    "delete",
    "trace",
    "accept",
    "accept-charset",
    "accept-encoding",
    "accept-language",
    "accept-ranges",
    "age",
    "allow",
    "authorization",
    "cache-control",
    "connection",
    "content-base",
    "content-encoding",
    "content-language",
    "content-length",
    "content-location",
    "content-md5",
    "content-range",
    "content-type",
    "date",
    "etag",
    "expect",
    "expires",
    "from",
    "host",
    "if-match",
    "if-modified-since",
    "if-none-match",
    "if-range",
    "if-unmodified-since",
    "last-modified",
    "location",
    "max-forwards",
    "pragma",
    "proxy-authenticate",
    "proxy-authorization",
    "range",
    "referer",
    "retry-after",
    "server",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
    "vary",
    "via",
    "warning",
    "www-authenticate",
    "method",
    "get",
    "status",
    "200 OK",
    "version",
    "HTTP/1.1",
    "url",
    "public",
    "set-cookie",
    "keep-alive",
    "origin",
];

/// The end of the dictionary.
const TEXT: &str = concat!(
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505",
    "203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized",
    "403 Forbidden404 Not Found500 Internal Server Error501 Not Implemented503 Service Unavailable",
    "Jan Feb Mar Apr May Jun Jul Aug Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMT",
    "chunked,text/html,image/png,image/jpg,image/gif,application/xml,application/xhtml+xml,text/plain,",
    "text/javascript,publicprivatemax-age=gzip,deflate,sdchcharset=utf-8charset=iso-8859-1,utf-,*,enq=0.",
);

/// Section 2.6.10.1 of the draft.
fn dictionary() -> Vec<u8> {
    let mut all = Vec::new();
    for word in WORDS {
        all.extend(u32::try_from(word.len()).unwrap_or_default().to_be_bytes());
        all.extend(word.as_bytes());
    }
    all.extend(TEXT.as_bytes());
    all
}

#[derive(Debug)]
pub(super) struct Inflate(Decompress);

impl Inflate {
    pub(super) fn new() -> Self {
        Self(Decompress::new(true))
    }

    pub(super) fn headers(&mut self, block: &[u8]) -> Result<Headers, Problem> {
        parse(&self.inflate(block)?)
    }

    fn inflate(&mut self, mut block: &[u8]) -> Result<Vec<u8>, Problem> {
        let wrong = |reason| Problem::Headers { reason };
        let mut plain = Vec::new();
        loop {
            let mut piece = [0; 4096];
            let (read, written) = (self.0.total_in(), self.0.total_out());
            let status = self.0.decompress(block, &mut piece, FlushDecompress::Sync);
            let count = |now: u64, before: u64| usize::try_from(now - before).unwrap_or(usize::MAX);
            block = block.get(count(self.0.total_in(), read)..).unwrap_or_default();
            let produced = count(self.0.total_out(), written);
            plain.extend_from_slice(&piece[..produced]);
            if plain.len() > MOST_BYTES {
                return Err(wrong("too long"));
            }
            match status {
                Err(error) if error.needs_dictionary().is_some() => {
                    self.0.set_dictionary(&dictionary()).map_err(|_| wrong("another dictionary"))?;
                }
                Err(_) => return Err(wrong("it is not compressed as it should be")),
                Ok(Status::StreamEnd) => return Err(wrong("its compression has ended")),
                // Full pieces may have a rest.
                Ok(Status::Ok | Status::BufError) if produced == piece.len() => {}
                Ok(Status::Ok) if !block.is_empty() => {}
                Ok(_) if block.is_empty() => return Ok(plain),
                Ok(_) => return Err(wrong("it is cut off")),
            }
        }
    }
}

#[derive(Debug)]
pub(super) struct Deflate(Compress);

impl Deflate {
    pub(super) fn new() -> Self {
        Self(Compress::new(Compression::fast(), true))
    }

    /// Of no header.
    pub(super) fn empty_block(&mut self) -> io::Result<Vec<u8>> {
        self.block(&[])
    }

    /// Of names in lower case, with their values.
    pub(super) fn block(&mut self, headers: &[(&str, &str)]) -> io::Result<Vec<u8>> {
        if self.0.total_in() == 0 {
            self.0.set_dictionary(&dictionary()).map_err(io::Error::other)?;
        }
        let number = |length: usize| u32::try_from(length).map(u32::to_be_bytes).map_err(io::Error::other);
        let mut plain = number(headers.len())?.to_vec();
        for text in headers.iter().flat_map(|(name, value)| [name, value]) {
            plain.extend(number(text.len())?);
            plain.extend(text.as_bytes());
        }
        // Enough for what cannot be compressed, and for a flush.
        let mut block = Vec::with_capacity(plain.len() + 256);
        self.0.compress_vec(&plain, &mut block, FlushCompress::Sync).map_err(io::Error::other)?;
        Ok(block)
    }
}

fn parse(mut plain: &[u8]) -> Result<Headers, Problem> {
    let count = number(&mut plain)?;
    if count > MOST_HEADERS {
        return Err(Problem::Headers { reason: "too many" });
    }
    (0..count).map(|_| Ok((text(&mut plain)?, text(&mut plain)?))).collect()
}

fn number(plain: &mut &[u8]) -> Result<u32, Problem> {
    let (bytes, rest) = plain.split_first_chunk().ok_or(Problem::Headers { reason: "it is cut off" })?;
    *plain = rest;
    Ok(u32::from_be_bytes(*bytes))
}

fn text(plain: &mut &[u8]) -> Result<String, Problem> {
    let length = usize::try_from(number(plain)?).unwrap_or(usize::MAX);
    let (bytes, rest) = plain.split_at_checked(length).ok_or(Problem::Headers { reason: "it is cut off" })?;
    *plain = rest;
    String::from_utf8(bytes.to_vec()).map_err(|_| Problem::Headers { reason: "it is not UTF-8" })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a client does, whose blocks are one stream.
    struct Client(Compress);

    impl Client {
        fn new() -> Self {
            let mut compress = Compress::new(Compression::best(), true);
            // The adler32 of SPDY/3's dictionary, which each stream begins with.
            assert_eq!(compress.set_dictionary(&dictionary()).unwrap(), 0xe3c6_a7c2);
            Self(compress)
        }

        fn block(&mut self, headers: &[(&str, &str)]) -> Vec<u8> {
            let length = |text: &str| u32::try_from(text.len()).unwrap().to_be_bytes();
            let mut plain = u32::try_from(headers.len()).unwrap().to_be_bytes().to_vec();
            for (name, value) in headers {
                plain.extend([&length(name)[..], name.as_bytes(), &length(value), value.as_bytes()].concat());
            }
            self.raw(&plain)
        }

        fn raw(&mut self, plain: &[u8]) -> Vec<u8> {
            let mut block = Vec::with_capacity(1 << 20);
            self.0.compress_vec(plain, &mut block, FlushCompress::Sync).unwrap();
            block
        }
    }

    fn owned(headers: &[(&str, &str)]) -> Headers {
        headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn blocks_of_one_direction_are_read_in_order() {
        let (mut client, mut inflate) = (Client::new(), Inflate::new());
        let long = "x".repeat(20_000);
        for headers in
            [&[("streamtype", "error")][..], &[], &[("port", "80"), ("requestid", "7")], &[("a", &long)]]
        {
            assert_eq!(inflate.headers(&client.block(headers)).unwrap(), owned(headers));
        }
    }

    #[test]
    fn what_this_side_writes_has_no_header() {
        let (mut deflate, mut inflate) = (Deflate::new(), Inflate::new());
        for _ in 0..3 {
            assert_eq!(inflate.headers(&deflate.empty_block().unwrap()).unwrap(), owned(&[]));
        }
    }

    #[test]
    fn a_hostile_block_is_an_error() {
        let refused = |plain: &[u8]| {
            let block = Client::new().raw(plain);
            Inflate::new().headers(&block).unwrap_err().to_string()
        };
        assert_eq!(refused(&vec![0; 1 << 20]), "a header block: too long");
        assert_eq!(refused(&u32::MAX.to_be_bytes()), "a header block: too many");
        assert_eq!(refused(&[0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff]), "a header block: it is cut off");
        assert_eq!(refused(&[0, 0]), "a header block: it is cut off");
        assert_eq!(refused(&[0, 0, 0, 1, 0, 0, 0, 1, 0xff, 0, 0, 0, 0]), "a header block: it is not UTF-8");
        Inflate::new().headers(b"no zlib stream").unwrap_err();
        let mut without_dictionary = Vec::with_capacity(100);
        let mut plain = Compress::new(Compression::fast(), true);
        plain.compress_vec(&[0; 4], &mut without_dictionary, FlushCompress::Sync).unwrap();
        assert_eq!(Inflate::new().headers(&without_dictionary).unwrap(), owned(&[]));
    }
}
