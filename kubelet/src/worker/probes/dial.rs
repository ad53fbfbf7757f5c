//! Connections of probes and hooks to hosts by address or name.
//!
//! A lookup (getaddrinfo(3)) cannot be cancelled: a name server that does not answer keeps its thread long
//! after the probe has given up.
//!
//! Invariants:
//! - Names take at most [`MOST_LOOKUPS`] of the threads on which the kubelet also does its disk work, and
//!   each name at most [`MOST_OF_NAME`].
//! - No caller waits longer than [`LOOKUP`] for a name.

use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use runtime::Locks;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::timeout;

const MOST_LOOKUPS: usize = 16;
const MOST_OF_NAME: usize = 2;
/// glibc asks each name server for 5 s (resolv.conf(5)).
const LOOKUP: Duration = Duration::from_secs(5);

static LOOKUPS: LazyLock<Lookups> = LazyLock::new(Lookups::default);

/// Permits for threads.
struct Lookups {
    all: Arc<Semaphore>,
    by_name: Locks<String, OfName>,
}

struct OfName(Arc<Semaphore>);

impl Default for Lookups {
    fn default() -> Self {
        Self { all: Arc::new(Semaphore::new(MOST_LOOKUPS)), by_name: Locks::default() }
    }
}

impl Default for OfName {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MOST_OF_NAME)))
    }
}

/// Connects to an IP address, or to a name's first address that accepts. The caller limits the time.
pub(super) async fn dial(host: &str, port: u16) -> io::Result<TcpStream> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return TcpStream::connect((address, port)).await;
    }
    let name = host.to_owned();
    let resolve =
        move || -> io::Result<Vec<SocketAddr>> { Ok((name.as_str(), port).to_socket_addrs()?.collect()) };
    let addresses = LOOKUPS.look_up(host, resolve).await?;
    TcpStream::connect(addresses.as_slice()).await
}

impl Lookups {
    /// Runs `resolve` on a thread of its own. Its permits are held until it returns, even if this future is
    /// dropped before.
    async fn look_up<T: Send + 'static>(
        &self,
        name: &str,
        resolve: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let of_name = self.by_name.of(name);
        let lookup = async {
            // The name's own first: who waits for it takes no other name's place.
            let own = Arc::clone(&of_name.0).acquire_owned().await.map_err(io::Error::other)?;
            let any = Arc::clone(&self.all).acquire_owned().await.map_err(io::Error::other)?;
            let of_name = Arc::clone(&of_name);
            let lookup = tokio::task::spawn_blocking(move || {
                let _held = (own, any, of_name);
                resolve()
            });
            lookup.await.map_err(io::Error::other)?
        };
        let late = |_elapsed| {
            let message = format!("the address of {name} is not known after {} s", LOOKUP.as_secs());
            io::Error::new(io::ErrorKind::TimedOut, message)
        };
        timeout(LOOKUP, lookup).await.map_err(late)?
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

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

    /// A lookup that ends when the sender is used or dropped, for a caller that gives up at once.
    async fn hang(lookups: &Lookups, name: &str) -> mpsc::Sender<()> {
        let (release, released) = mpsc::channel::<()>();
        let hangs = move || released.recv().map_err(io::Error::other);
        let given_up = timeout(Duration::from_millis(50), lookups.look_up(name, hangs)).await;
        assert!(given_up.is_err(), "it hangs");
        release
    }

    #[tokio::test]
    async fn lookups_that_hang_take_few_threads_and_leave_other_names_alone() {
        let lookups = Lookups::default();
        let mut dead = Vec::new();
        for _probe in 0..MOST_OF_NAME {
            dead.push(hang(&lookups, "dead").await);
        }
        let (begin, begun) = mpsc::channel();
        let third = move || begin.send(()).map_err(io::Error::other);
        timeout(Duration::from_millis(50), lookups.look_up("dead", third)).await.unwrap_err();
        assert!(begun.recv().is_err(), "the third lookup never ran");
        assert_eq!(lookups.look_up("other", || Ok(1)).await.unwrap(), 1);

        let mut others = Vec::new();
        for number in 0..MOST_LOOKUPS - MOST_OF_NAME {
            others.push(hang(&lookups, &number.to_string()).await);
        }
        let full = timeout(Duration::from_millis(50), lookups.look_up("another", || Ok(2)));
        assert!(full.await.is_err(), "no thread is left");
        drop(dead.pop());
        assert_eq!(lookups.look_up("dead", || Ok(3)).await.unwrap(), 3, "a thread is free again");
        drop(others);
    }

    #[tokio::test]
    async fn a_caller_waits_no_longer_than_the_limit() {
        let lookups = Lookups::default();
        let (release, released) = mpsc::channel::<()>();
        let hangs = move || released.recv().map_err(io::Error::other);
        let error = lookups.look_up("dead", hangs).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(error.to_string(), "the address of dead is not known after 5 s");
        drop(release);
    }
}
