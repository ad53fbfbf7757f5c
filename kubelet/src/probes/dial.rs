//! Connections of probes and hooks to hosts by address or name.
//!
//! Invariant: names take at most [`MOST_LOOKUPS`] of the threads on which the kubelet also does its disk
//! work. A lookup (getaddrinfo(3)) cannot be cancelled: a name server that does not answer keeps its thread
//! long after the probe has given up.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

use tokio::net::TcpStream;
use tokio::sync::Semaphore;

const MOST_LOOKUPS: usize = 16;

static LOOKUPS: Semaphore = Semaphore::const_new(MOST_LOOKUPS);

/// Connects to an IP address, or to a name's first address that accepts. Waits while too many names are
/// looked up: the caller limits the time.
pub(super) async fn dial(host: &str, port: u16) -> io::Result<TcpStream> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return TcpStream::connect((address, port)).await;
    }
    let name = host.to_owned();
    let resolve =
        move || -> io::Result<Vec<SocketAddr>> { Ok((name.as_str(), port).to_socket_addrs()?.collect()) };
    let addresses = look_up(&LOOKUPS, resolve).await?;
    TcpStream::connect(addresses.as_slice()).await
}

/// Runs `resolve` on a thread of its own. The permit is held until it returns, even if this future is
/// dropped before.
async fn look_up<T: Send + 'static>(
    permits: &'static Semaphore,
    resolve: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let permit = permits.acquire().await.map_err(io::Error::other)?;
    let lookup = tokio::task::spawn_blocking(move || {
        let _held = permit;
        resolve()
    });
    lookup.await.map_err(io::Error::other)?
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn names_and_addresses_lead_to_a_server() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        for host in ["127.0.0.1", "localhost"] {
            let connected = dial(host, address.port()).await.unwrap();
            assert_eq!(connected.peer_addr().unwrap(), address, "{host}");
        }
    }

    #[tokio::test]
    async fn lookups_that_hang_take_a_limited_number_of_threads() {
        static PERMITS: Semaphore = Semaphore::const_new(2);
        let limit = Duration::from_millis(50);
        let mut releases = Vec::new();
        for _probe in 0..2 {
            let (release, released) = mpsc::channel::<()>();
            let hangs = move || released.recv().map_err(io::Error::other);
            assert!(timeout(limit, look_up(&PERMITS, hangs)).await.is_err(), "it hangs");
            releases.push(release);
        }
        let (begin, begun) = mpsc::channel();
        let third = move || begin.send(()).map_err(io::Error::other);
        assert!(timeout(limit, look_up(&PERMITS, third)).await.is_err(), "no thread is left");
        assert!(begun.recv().is_err(), "the third lookup never ran");
        releases.pop().unwrap().send(()).unwrap();
        let fourth = timeout(Duration::from_secs(10), look_up(&PERMITS, || Ok(4)));
        assert_eq!(fourth.await.unwrap().unwrap(), 4);
    }
}
