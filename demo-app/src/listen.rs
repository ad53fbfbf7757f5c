//! Connections of the servers: a thread for each.

use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::thread;
use std::time::Duration;

/// A server of the files of one directory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Server {
    /// In its errors.
    pub(crate) name: &'static str,
    /// In its first line.
    pub(crate) title: &'static str,
    /// Most that a read or a write waits.
    pub(crate) timeout: Duration,
    pub(crate) answer: fn(TcpStream, &Path) -> io::Result<()>,
}

impl Server {
    /// Answers until the process ends. `[::]` takes v4 too: the kernel's
    /// net.ipv6.bindv6only is 0 by default.
    pub(crate) fn run(self, address: SocketAddr, dir: &Path) -> io::Result<()> {
        let listener = TcpListener::bind(address)?;
        crate::say(&format!("{} {} on {}", self.title, dir.display(), listener.local_addr()?))?;
        for stream in listener.incoming() {
            let (stream, dir) = (stream?, dir.to_path_buf());
            thread::spawn(move || {
                if let Err(error) = self.answer(stream, &dir) {
                    let _unwritable = writeln!(io::stderr(), "{}: {error}", self.name);
                }
            });
        }
        Ok(())
    }

    fn answer(&self, stream: TcpStream, dir: &Path) -> io::Result<()> {
        stream.set_read_timeout(Some(self.timeout))?;
        stream.set_write_timeout(Some(self.timeout))?;
        (self.answer)(stream, dir)
    }
}
