//! The two pods of the demo. They know of each other only what the shared
//! volume tells them: pod one leaves a greeting and its own addresses there,
//! pod two waits for both, reads the one and calls the others.
//!
//! What they print is what the demo verifies, so every line says what was done
//! and with which result.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use nix::ifaddrs::getifaddrs;
use nix::sys::socket::SockaddrStorage;

use crate::http;
use crate::{invalid, monotonic_ns, say};

/// The file that pod one writes and serves.
const GREETING: &str = "greeting";
/// Pod one's addresses, one a line.
const ADDRESSES: &str = "addresses";
const TIMEOUT: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(5);

/// Writes the greeting and its addresses into `dir`, then serves `dir` for ever.
pub(crate) fn one(dir: &Path, port: u16) -> io::Result<()> {
    let host = nix::sys::utsname::uname()?.nodename().to_string_lossy().into_owned();
    let text = format!("greetings from {host}, written at {} ns", monotonic_ns()?);
    put(dir, GREETING, &text)?;
    say(&format!("wrote {text}"))?;
    let addresses = global_addresses()?;
    put(dir, ADDRESSES, &addresses.iter().map(IpAddr::to_string).collect::<Vec<_>>().join("\n"))?;
    http::SERVER.run(SocketAddr::from(([0_u16; 8], port)), dir)
}

/// Reads what pod one wrote from `dir` and by HTTP over each of its addresses,
/// then serves `dir` too.
pub(crate) fn two(dir: &Path, port: u16) -> io::Result<()> {
    let addresses = wait_for(&dir.join(ADDRESSES))?;
    let text = wait_for(&dir.join(GREETING))?;
    say(&format!("read {}", text.trim_end()))?;
    for address in addresses.lines() {
        let address: IpAddr =
            address.parse().map_err(|e| invalid(&format!("{ADDRESSES}: {address:?}: {e}")))?;
        let body = http::fetch(&format!("http://{}/{GREETING}", SocketAddr::new(address, port)), TIMEOUT)?;
        let family = if address.is_ipv4() { "v4" } else { "v6" };
        say(&format!("fetched over {family} {}", String::from_utf8_lossy(&body).trim_end()))?;
    }
    http::SERVER.run(SocketAddr::from(([0_u16; 8], port)), dir)
}

/// Whole or not at all: pod two reads while pod one writes.
fn put(dir: &Path, name: &str, text: &str) -> io::Result<()> {
    let unfinished = dir.join(format!(".{name}"));
    crate::write_synced(&unfinished, text)?;
    fs::rename(&unfinished, dir.join(name))
}

#[expect(
    clippy::disallowed_methods,
    reason = "inotify does not see what another client of the file system wrote"
)]
fn wait_for(file: &Path) -> io::Result<String> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match fs::read_to_string(file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && Instant::now() < deadline => {
                thread::sleep(PAUSE);
            }
            Err(error) => return Err(io::Error::new(error.kind(), format!("{}: {error}", file.display()))),
            Ok(text) => return Ok(text),
        }
    }
}

/// Every address of the namespace that a neighbour can call: no loopback, no link-local.
fn global_addresses() -> io::Result<Vec<IpAddr>> {
    let addresses =
        getifaddrs()?.filter_map(|entry| ip_address(&entry.address?)).filter(|address| match address {
            IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local(),
            IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unicast_link_local(),
        });
    Ok(addresses.collect())
}

fn ip_address(address: &SockaddrStorage) -> Option<IpAddr> {
    let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
    v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
}
