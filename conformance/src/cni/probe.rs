//! What packets do: one exchange from one namespace to another, and whom the far
//! end saw.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use linux::netns::NetNs;
use tests::eventually;

use super::world::World;

/// Timeout for packets that must arrive; usually they arrive at once.
const TIMEOUT: Duration = Duration::from_secs(5);
/// For what must not arrive. Everything here is one machine: what is not there
/// after this was dropped.
const SILENCE: Duration = Duration::from_millis(250);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Protocol {
    Tcp,
    Udp,
}

#[derive(Debug, Clone)]
pub(super) struct Probe {
    pub(super) protocol: Protocol,
    /// `host`, `outside` or a container
    pub(super) from: &'static str,
    /// The sender's port, where it matters.
    pub(super) from_port: u16,
    /// What the sender dials.
    pub(super) to: SocketAddr,
    /// The port of the listener, on all addresses.
    pub(super) server: &'static str,
    pub(super) port: u16,
    /// The address that the server sees; `None`: nothing arrives.
    pub(super) seen: Option<IpAddr>,
}

impl Probe {
    /// `from` dials `to`, an address and port of `server`.
    pub(super) fn tcp(from: &'static str, to: &str, server: &'static str) -> Self {
        let to: SocketAddr = to.parse().expect("a scenario's address");
        Self { protocol: Protocol::Tcp, from, from_port: 0, to, server, port: to.port(), seen: None }
    }

    pub(super) fn udp(from: &'static str, to: &str, server: &'static str) -> Self {
        Self { protocol: Protocol::Udp, ..Self::tcp(from, to, server) }
    }

    /// The server's port, where it is not the one that is dialled.
    pub(super) fn port(self, port: u16) -> Self {
        Self { port, ..self }
    }

    pub(super) fn by_port(self, from_port: u16) -> Self {
        Self { from_port, ..self }
    }

    pub(super) fn sees(self, address: &str) -> Self {
        Self { seen: Some(address.parse().expect("a scenario's address")), ..self }
    }

    /// `tcp c1 -> 10.1.0.1:80 (host:80)`
    pub(super) fn label(&self) -> String {
        let protocol = match self.protocol {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        };
        format!("{protocol} {} -> {} ({}:{})", self.from, self.to, self.server, self.port)
    }

    /// What was to be seen, in the words of [`Probe::run`].
    pub(super) fn expected(&self) -> String {
        self.seen.map_or_else(|| "nothing arrives".to_owned(), |seen| format!("from {seen}"))
    }

    /// `from ADDRESS`, or `nothing arrives`.
    pub(super) fn run(&self, world: &World<'_>) -> Result<String> {
        let (client, server) = (world.existing(self.from)?, world.existing(self.server)?);
        let once = |timeout| match self.protocol {
            Protocol::Tcp => self.tcp_once(client, server, timeout),
            Protocol::Udp => self.udp_once(client, server, timeout),
        };
        let seen = match self.seen {
            // The first packet may meet an address or a neighbour that is not ready yet.
            Some(_) => eventually(&self.label(), TIMEOUT, || match once(TIMEOUT / 5)? {
                Some(seen) => Ok(seen),
                None => bail!("nothing arrives"),
            })
            .ok(),
            None => once(SILENCE)?,
        };
        Ok(seen.map_or_else(|| "nothing arrives".to_owned(), |seen| format!("from {seen}")))
    }

    fn listen_on(&self) -> SocketAddr {
        let any: IpAddr = match self.to {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        SocketAddr::new(any, self.port)
    }

    /// A socket of the last try is still held, for a moment, by whatever process
    /// another thread was about to start just then.
    fn bind<T>(&self, bind: impl FnMut() -> Result<T>) -> Result<T> {
        eventually(&format!("bind for {}", self.label()), TIMEOUT, bind)
    }

    fn tcp_once(&self, client: &NetNs, server: &NetNs, timeout: Duration) -> Result<Option<IpAddr>> {
        let listener = self.bind(|| Ok(server.run(|| TcpListener::bind(self.listen_on()))??))?;
        let stream = match client.run(|| TcpStream::connect_timeout(&self.to, timeout))? {
            Ok(stream) => stream,
            Err(e) if is_silence(&e) => return Ok(None),
            Err(e) => return Err(e).context("connect"),
        };
        // The answer may come from another server.
        listener.set_nonblocking(true)?;
        let (mut accepted, peer) = match listener.accept() {
            Ok(accepted) => accepted,
            Err(e) if is_silence(&e) => bail!("another server than {} answered", self.server),
            Err(e) => return Err(e).context("accept"),
        };
        accepted.write_all(b"ship")?;
        drop(accepted);
        stream.set_read_timeout(Some(timeout))?;
        let mut text = String::new();
        (&stream).read_to_string(&mut text).context("read")?;
        anyhow::ensure!(text == "ship", "read {text:?}");
        Ok(Some(peer.ip()))
    }

    fn udp_once(&self, client: &NetNs, server: &NetNs, timeout: Duration) -> Result<Option<IpAddr>> {
        let listening = self.bind(|| Ok(server.run(|| UdpSocket::bind(self.listen_on()))??))?;
        let local = SocketAddr::new(self.listen_on().ip(), self.from_port);
        let socket = self.bind(|| Ok(client.run(|| UdpSocket::bind(local))??))?;
        let mut buffer = [0; 16];
        let sent = client.run(|| {
            socket.connect(self.to)?;
            socket.send(b"ping")
        })?;
        match sent {
            Ok(_) => {}
            Err(e) if is_silence(&e) => return Ok(None),
            Err(e) => return Err(e).context("send"),
        }
        listening.set_read_timeout(Some(timeout))?;
        let received = loop {
            match listening.recv_from(&mut buffer) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                received => break received,
            }
        };
        let peer = match received {
            Ok((_, peer)) => peer,
            Err(e) if is_silence(&e) => return Ok(None),
            Err(e) => return Err(e).context("receive"),
        };
        listening.send_to(b"pong", peer)?;
        socket.set_read_timeout(Some(timeout))?;
        let length = socket.recv(&mut buffer).context("the answer")?;
        anyhow::ensure!(buffer.get(..length) == Some(b"pong".as_slice()), "not the answer");
        Ok(Some(peer.ip()))
    }
}

/// Dropped, refused or without a route: nothing arrives, in whatever way the kernel says so.
fn is_silence(error: &io::Error) -> bool {
    use io::ErrorKind as Kind;
    matches!(
        error.kind(),
        Kind::TimedOut
            | Kind::WouldBlock
            | Kind::ConnectionRefused
            | Kind::HostUnreachable
            | Kind::NetworkUnreachable
            | Kind::AddrNotAvailable
            | Kind::PermissionDenied
    )
}
