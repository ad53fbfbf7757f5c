//! A client of HTTP/1.1 that sends one request on a connection, as the endpoints take it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use tests::Node;

/// No answer takes so long.
const TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) trait Stream: Read + Write + Send {}
impl<S: Read + Write + Send> Stream for S {}

/// Where the endpoints are.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    socket: PathBuf,
}

/// A connection whose request is sent.
pub(crate) struct Asked(pub(crate) Box<dyn Stream>);

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// With names in lower case.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Place {
    pub(crate) fn unix(node: &Node<'_>) -> Self {
        Self { socket: node.root_dir().join("hawser/http.sock") }
    }

    pub(crate) fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.socket).expect("the kubelet listens");
        stream.set_read_timeout(Some(TIMEOUT)).expect("set");
        stream.set_write_timeout(Some(TIMEOUT)).expect("set");
        stream
    }

    /// Sends a GET with no further headers.
    pub(crate) fn open(&self, path: &str) -> Asked {
        self.send("GET", path, &[])
    }

    pub(crate) fn send(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> Asked {
        send(self.connect(), method, path, headers)
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.open(path).read()
    }
}

/// Lets this process have thousands of connections, if it may not yet.
pub(crate) fn allow_many_connections() {
    const RLIMIT_NOFILE: u32 = 7;
    const WANTED: u64 = 8192;
    if linux::process::descriptor_limit() < WANTED {
        let (soft, _hard) = linux::process::set_rlimit(RLIMIT_NOFILE, WANTED, 512 << 10).expect("set");
        assert!(soft >= WANTED, "this process may open {soft} files only");
    }
}

pub(crate) fn tcp(address: std::net::SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("the kubelet listens");
    stream.set_read_timeout(Some(TIMEOUT)).expect("set");
    stream
}

pub(crate) fn send(
    mut stream: impl Stream + 'static,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
) -> Asked {
    let lines: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let request = format!("{method} {path} HTTP/1.1\r\nHost: node\r\n{lines}\r\n");
    stream.write_all(request.as_bytes()).expect("sent");
    Asked(Box::new(stream))
}

impl Asked {
    /// The answer, to the end of the connection.
    pub(crate) fn read(mut self) -> Answer {
        let mut bytes = Vec::new();
        match self.0.read_to_end(&mut bytes) {
            // A peer that closes TCP without a word of TLS has sent all the same.
            Err(e) if e.kind() != std::io::ErrorKind::UnexpectedEof => panic!("read the answer: {e}"),
            _ => {}
        }
        let (head, body) = split(&bytes);
        let mut answer = head;
        answer.body =
            if answer.header("transfer-encoding") == "chunked" { joined(body) } else { body.to_vec() };
        answer
    }

    /// The head of the answer; what follows is still to be read.
    pub(crate) fn head(&mut self) -> Answer {
        let mut bytes = Vec::new();
        while !bytes.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            self.0.read_exact(&mut byte).expect("an answer");
            bytes.push(byte[0]);
        }
        split(&bytes).0
    }
}

fn split(bytes: &[u8]) -> (Answer, &[u8]) {
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n");
    let end = end.unwrap_or_else(|| panic!("no answer: {:?}", String::from_utf8_lossy(bytes)));
    let head = String::from_utf8_lossy(&bytes[..end]);
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok());
    let headers = lines.filter_map(|line| line.split_once(": "));
    let headers = headers.map(|(name, value)| (name.to_lowercase(), value.to_owned())).collect();
    (Answer { status: status.expect("a status"), headers, body: Vec::new() }, &bytes[end + 4..])
}

/// The chunks of a body (RFC 9112, 7.1), which has to be whole.
fn joined(mut body: &[u8]) -> Vec<u8> {
    let mut whole = Vec::new();
    loop {
        let end = body.windows(2).position(|two| two == b"\r\n").expect("a chunk's size");
        let size =
            std::str::from_utf8(&body[..end]).ok().and_then(|size| usize::from_str_radix(size, 16).ok());
        let size = size.expect("a hexadecimal number");
        if size == 0 {
            return whole;
        }
        whole.extend_from_slice(&body[end + 2..end + 2 + size]);
        body = &body[end + 4 + size..];
    }
}

impl Answer {
    /// Empty if there is none.
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.iter().find(|(found, _)| found == name).map_or("", |(_, value)| value)
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}
