//! HTTP/1.0, as much as two pods need to prove that they reach each other: GET
//! of the files of one directory, by IP address.
//!
//! Invariant: a request names one file of the directory itself; a slash or ".."
//! in it is answered 404 without touching the disk.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use crate::invalid;
use crate::listen::Server;

/// How long one connection may take, either side.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(2);
/// Between two tries of `fetch`.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

pub(crate) const SERVER: Server =
    Server { name: "serve", title: "serving", timeout: CONNECTION_TIMEOUT, answer };

fn answer(mut stream: TcpStream, dir: &Path) -> io::Result<()> {
    let mut lines = BufReader::new(&stream).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    // The rest of the head is read, so that closing does not reset the connection under the client.
    while lines.next().transpose()?.is_some_and(|line| !line.is_empty()) {}
    let (status, body) = match file_name(&request).map(|name| fs::read(dir.join(name))) {
        Some(Ok(body)) => ("200 OK", body),
        Some(Err(error)) if error.kind() != io::ErrorKind::NotFound => {
            ("500 Internal Server Error", format!("{error}\n").into_bytes())
        }
        _ => ("404 Not Found", b"no such file\n".to_vec()),
    };
    write!(stream, "HTTP/1.0 {status}\r\nContent-Length: {}\r\n\r\n", body.len())?;
    stream.write_all(&body)
}

/// The file of `GET /name HTTP/1.0`.
fn file_name(request: &str) -> Option<&str> {
    let path = request.strip_prefix("GET /")?.split(' ').next()?;
    (!path.is_empty() && !path.contains('/') && path != "..").then_some(path)
}

/// The body of `url`; tries again until `timeout` has passed.
#[expect(clippy::disallowed_methods, reason = "a client gets no event when a remote listener appears")]
pub(crate) fn fetch(url: &str, timeout: Duration) -> io::Result<Vec<u8>> {
    let (address, path) = parse_url(url)?;
    let deadline = Instant::now() + timeout;
    loop {
        match fetch_once(address, path) {
            Ok(body) => return Ok(body),
            Err(error) if Instant::now() >= deadline => {
                return Err(io::Error::new(error.kind(), format!("{error} (after {timeout:?})")));
            }
            Err(_) => thread::sleep(RETRY_PAUSE),
        }
    }
}

/// `http://10.0.0.2:8080/file`, `http://[fd00::2]:8080/file`.
fn parse_url(url: &str) -> io::Result<(SocketAddr, &str)> {
    let rest = url.strip_prefix("http://").ok_or_else(|| invalid(&format!("URL {url:?}: not http://")))?;
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    let with_port =
        if host.ends_with(']') || !host.contains(':') { format!("{host}:80") } else { host.to_owned() };
    let address = with_port.parse().map_err(|e| invalid(&format!("URL {url:?}: host {host:?}: {e}")))?;
    Ok((address, path))
}

fn fetch_once(address: SocketAddr, path: &str) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect_timeout(&address, CONNECTION_TIMEOUT)?;
    stream.set_read_timeout(Some(CONNECTION_TIMEOUT))?;
    stream.set_write_timeout(Some(CONNECTION_TIMEOUT))?;
    write!(stream, "GET /{path} HTTP/1.0\r\nHost: {address}\r\n\r\n")?;
    let mut reply = Vec::new();
    stream.read_to_end(&mut reply)?;
    body_of(&reply)
        .map_err(|why| io::Error::new(io::ErrorKind::InvalidData, format!("{address}/{path}: {why}")))
}

/// The body of a reply that is whole and says 200.
fn body_of(reply: &[u8]) -> Result<Vec<u8>, String> {
    let end_of_head =
        reply.windows(4).position(|window| window == b"\r\n\r\n").ok_or("the reply has no head")?;
    let (head, body) = (String::from_utf8_lossy(&reply[..end_of_head]), &reply[end_of_head + 4..]);
    let mut lines = head.lines();
    let status = lines.next().unwrap_or_default();
    if status.split(' ').nth(1) != Some("200") {
        return Err(format!("answered {status:?}"));
    }
    let length =
        lines.find_map(|line| line.strip_prefix("Content-Length: ")).and_then(|n| n.parse::<usize>().ok());
    match length {
        Some(length) if length != body.len() => Err(format!("{} of {length} bytes came", body.len())),
        _ => Ok(body.to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_an_address_of_either_family_and_a_path() {
        let (v4, path) = parse_url("http://10.0.0.2:8080/greeting").unwrap();
        assert_eq!((v4.to_string().as_str(), path), ("10.0.0.2:8080", "greeting"));
        let (v6, path) = parse_url("http://[fd00::2]/").unwrap();
        assert_eq!((v6.to_string().as_str(), path), ("[fd00::2]:80", ""));
        let error = parse_url("http://pod-one/").unwrap_err();
        assert_eq!(
            error.to_string(),
            r#"URL "http://pod-one/": host "pod-one": invalid socket address syntax"#
        );
    }

    #[test]
    fn a_request_never_leaves_the_directory() {
        assert_eq!(file_name("GET /greeting HTTP/1.0"), Some("greeting"));
        for request in
            ["GET / HTTP/1.0", "GET /../etc HTTP/1.0", "GET /.. HTTP/1.0", "GET //etc HTTP/1.0", "PUT /a"]
        {
            assert_eq!(file_name(request), None, "{request}");
        }
    }

    #[test]
    fn a_short_or_refused_reply_is_an_error() {
        assert_eq!(body_of(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi").unwrap(), b"hi");
        assert_eq!(
            body_of(b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nhi").unwrap_err(),
            "2 of 3 bytes came"
        );
        assert_eq!(
            body_of(b"HTTP/1.0 404 Not Found\r\n\r\n").unwrap_err(),
            r#"answered "HTTP/1.0 404 Not Found""#
        );
        assert_eq!(body_of(b"").unwrap_err(), "the reply has no head");
    }
}
