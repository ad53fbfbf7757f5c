//! Connections to a pod's ports.

pub(super) mod by_spdy;
pub(super) mod by_tunnel;
pub(super) mod by_websocket;
mod inlet;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use linux::netns::NetNs;
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::blocking::blocking;
use crate::error::{Error, Result};
use crate::runtime::state::Sandbox;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const READ_BYTES: usize = 32 << 10;

/// What a client may reach.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) sandbox: Arc<Sandbox>,
    /// Empty: all.
    pub(super) ports: Vec<u16>,
    /// Connections of all clients.
    pub(super) places: Arc<Semaphore>,
}

/// A connection, and its place among those of all clients.
type Connected = (TcpStream, OwnedSemaphorePermit);

/// On the pod's loopback interface: v4, then v6. Only while the pod runs.
async fn connect(target: Arc<Target>, port: u16) -> Result<Connected> {
    let failed = |source| Error::Connect { source };
    if !target.ports.is_empty() && !target.ports.contains(&port) {
        return Err(Error::invalid("port", "the request for the URL did not name it"));
    }
    let place = Arc::clone(&target.places).try_acquire_owned();
    let place = place.map_err(|_| Error::Busy { what: "port-forward: too many connections" })?;
    let network = target.sandbox.ready()?.netns;
    let addresses = [IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST)];
    // A socket keeps the network in which it was made.
    let make = move || {
        let make = || addresses.map(|address| socket(address.is_ipv6()));
        let sockets = match network {
            Some(path) => NetNs::open(&path)?.run(make)?,
            None => make(),
        };
        Ok::<_, Error>(sockets)
    };
    let mut problem = None;
    for (address, socket) in addresses.into_iter().zip(blocking("connect to a pod", make).await?) {
        // A node may have no IPv6.
        let socket = match socket {
            Ok(socket) => socket,
            Err(error) => {
                problem = problem.or(Some(error));
                continue;
            }
        };
        let connect = TcpSocket::from_std_stream(socket).connect(SocketAddr::new(address, port));
        match tokio::time::timeout(CONNECT_TIMEOUT, connect).await {
            Ok(Ok(stream)) => return Ok((stream, place)),
            Ok(Err(error)) => problem = problem.or(Some(error)),
            Err(_elapsed) => problem = problem.or(Some(std::io::ErrorKind::TimedOut.into())),
        }
    }
    Err(failed(problem.unwrap_or_else(|| std::io::ErrorKind::AddrNotAvailable.into())))
}

fn socket(is_v6: bool) -> std::io::Result<std::net::TcpStream> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    let family = if is_v6 { AddressFamily::INET6 } else { AddressFamily::INET };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(family, SocketType::STREAM, flags, None)?.into())
}
