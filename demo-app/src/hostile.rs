//! An HTTP server that no client should trust: for tests of probes.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

/// Between two bytes of `/slow`.
const PAUSE: Duration = Duration::from_millis(100);
/// More than a client may keep of `/flood`.
const FLOOD_BYTES: usize = 10 << 20;

/// Answers until the process ends:
/// - `/redirect` leads to another host, `/loop` to itself;
/// - `/slow` sends a byte of its body from time to time, `/flood` sends 10 MiB at once;
/// - any other path is a 200 with a short body.
pub(crate) fn serve(address: SocketAddr) -> io::Result<()> {
    let listener = TcpListener::bind(address)?;
    crate::say(&format!("serving on {}", listener.local_addr()?))?;
    for stream in listener.incoming() {
        let stream = stream?;
        // A client that hangs up early is the purpose.
        thread::spawn(move || answer(&stream).ok());
    }
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "to be slow is the purpose")]
fn answer(mut stream: &TcpStream) -> io::Result<()> {
    let mut lines = BufReader::new(stream).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    while lines.next().transpose()?.is_some_and(|line| !line.is_empty()) {}
    match request.split(' ').nth(1).unwrap_or_default() {
        "/redirect" => write!(
            stream,
            "HTTP/1.1 302 Found\r\nLocation: http://192.0.2.1/\r\nContent-Length: 4\r\n\r\naway"
        ),
        "/loop" => write!(stream, "HTTP/1.1 302 Found\r\nLocation: /loop\r\nContent-Length: 0\r\n\r\n"),
        "/slow" => {
            write!(stream, "HTTP/1.1 200 OK\r\n\r\n")?;
            loop {
                stream.write_all(b".")?;
                thread::sleep(PAUSE);
            }
        }
        "/flood" => {
            write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {FLOOD_BYTES}\r\n\r\n")?;
            stream.write_all(&vec![b'x'; FLOOD_BYTES])
        }
        _ => write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nok\n"),
    }
}
