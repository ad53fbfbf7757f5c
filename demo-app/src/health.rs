//! grpc.health.v1.Health/Check over HTTP/2, as much as a probe needs: no gRPC library beside a program this small.
//! Each request is taken for a Check, so no header is decoded.
//!
//! Invariant: a frame or a request that is longer than [`MOST_BYTES`] ends its connection.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use crate::invalid;
use crate::listen::Server;

/// A frame's type and flags (RFC 9113, 6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const ACK: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// The default of SETTINGS_MAX_FRAME_SIZE.
const MOST_BYTES: usize = 1 << 14;
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);

/// `:status: 200` by its index, and `content-type: application/grpc` with the indexed name (RFC 7541).
const HEAD: &[u8] = b"\x88\x0f\x10\x10application/grpc";
const TRAILERS: &[u8] = b"\x00\x0bgrpc-status\x010";

/// The values of ServingStatus.
const SERVING: u8 = 1;
const NOT_SERVING: u8 = 2;

/// A service is SERVING while the directory has a file with its name. The server as a whole always is.
pub(crate) const SERVER: Server =
    Server { name: "health", title: "health of", timeout: CONNECTION_TIMEOUT, answer };

/// Until the client closes the connection.
fn answer(mut stream: TcpStream, dir: &Path) -> io::Result<()> {
    let mut preface = [0; PREFACE.len()];
    stream.read_exact(&mut preface)?;
    if preface != PREFACE {
        return Err(invalid("the client does not speak HTTP/2"));
    }
    stream.write_all(&frame(SETTINGS, 0, 0, &[])?)?;
    let mut request = Vec::new();
    while let Some(Frame { kind, flags, stream_id, payload }) = next_frame(&mut stream)? {
        match kind {
            SETTINGS if flags & ACK == 0 => stream.write_all(&frame(SETTINGS, ACK, 0, &[])?)?,
            PING if flags & ACK == 0 => stream.write_all(&frame(PING, ACK, 0, &payload)?)?,
            GOAWAY => return Ok(()),
            DATA => {
                request.extend_from_slice(&payload);
                if request.len() > MOST_BYTES {
                    return Err(invalid("a request that is too long"));
                }
                if flags & END_STREAM != 0 {
                    stream.write_all(&check(stream_id, &request, dir)?)?;
                    request.clear();
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// The frames of the answer to a HealthCheckRequest.
fn check(stream_id: u32, request: &[u8], dir: &Path) -> io::Result<Vec<u8>> {
    let service = service_of(request)?;
    let is_name = !service.contains('/') && service != "..";
    let serves = service.is_empty() || (is_name && dir.join(service).is_file());
    let status = if serves { SERVING } else { NOT_SERVING };
    // Uncompressed, two bytes: field 1 as a varint.
    let message = [0, 0, 0, 0, 2, 0x08, status];
    Ok([
        frame(HEADERS, END_HEADERS, stream_id, HEAD)?,
        frame(DATA, 0, stream_id, &message)?,
        frame(HEADERS, END_HEADERS | END_STREAM, stream_id, TRAILERS)?,
    ]
    .concat())
}

/// The only field of a HealthCheckRequest, after the five bytes before a gRPC message.
fn service_of(request: &[u8]) -> io::Result<&str> {
    let wrong = || invalid("not a HealthCheckRequest");
    match request.get(5..).ok_or_else(wrong)? {
        [] => Ok(""),
        [0x0a, length, name @ ..] if usize::from(*length) == name.len() && *length < 0x80 => {
            std::str::from_utf8(name).map_err(|_| wrong())
        }
        _ => Err(wrong()),
    }
}

struct Frame {
    kind: u8,
    flags: u8,
    stream_id: u32,
    payload: Vec<u8>,
}

/// `None` if the client has closed the connection.
fn next_frame(stream: &mut impl Read) -> io::Result<Option<Frame>> {
    let mut head = [0; 9];
    match stream.read_exact(&mut head) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let [a, b, c, kind, flags, id @ ..] = head;
    let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
    if length > MOST_BYTES {
        return Err(invalid("a frame that is too long"));
    }
    let mut payload = vec![0; length];
    stream.read_exact(&mut payload)?;
    let stream_id = u32::from_be_bytes(id) & (u32::MAX >> 1);
    Ok(Some(Frame { kind, flags, stream_id, payload }))
}

fn frame(kind: u8, flags: u8, stream_id: u32, payload: &[u8]) -> io::Result<Vec<u8>> {
    let length = u32::try_from(payload.len()).map_err(|_| invalid("a frame that is too long"))?;
    let [_, length @ ..] = length.to_be_bytes();
    Ok([&length[..], &[kind, flags], &stream_id.to_be_bytes(), payload].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_serves_while_its_file_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let status = |service: &[u8]| {
            let length = u8::try_from(service.len()).unwrap();
            let request = [&[0, 0, 0, 0, length + 2, 0x0a, length], service].concat();
            let frames = check(1, &request, dir.path()).unwrap();
            let mut frames = &frames[..];
            let (_head, data) = (next_frame(&mut frames).unwrap(), next_frame(&mut frames).unwrap());
            data.expect("a message").payload[6]
        };
        assert_eq!((status(b""), status(b"shop"), status(b"..")), (SERVING, NOT_SERVING, NOT_SERVING));
        std::fs::write(dir.path().join("shop"), "").unwrap();
        assert_eq!((status(b"shop"), status(b"./shop")), (SERVING, NOT_SERVING));
    }

    #[test]
    fn what_is_no_request_is_an_error() {
        assert_eq!(service_of(&[0; 5]).unwrap(), "");
        for wrong in [&[0; 4][..], &[0, 0, 0, 0, 0, 0x0a, 9, b'x'], &[0, 0, 0, 0, 0, 0x12, 1, b'x']] {
            assert_eq!(service_of(wrong).unwrap_err().to_string(), "not a HealthCheckRequest");
        }
        let long = [0xff, 0xff, 0xff, DATA, 0, 0, 0, 0, 1];
        assert_eq!(next_frame(&mut &long[..]).err().unwrap().to_string(), "a frame that is too long");
    }
}
