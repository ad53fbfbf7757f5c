//! Addresses of hosts, found by the C library in a process of its own.
//!
//! A static program has a getaddrinfo(3) that may load the node's NSS modules, which are made for the
//! node's C library. If that fails badly, only this process ends.

use std::net::{IpAddr, ToSocketAddrs};
use std::process::Stdio;
use std::time::Duration;

use super::error::{Problem, Result};
use crate::reexec::{RESOLVER_NAME, own_program};

/// More are not tried.
const MAX_ADDRESSES: usize = 16;

pub(super) async fn addresses(host: &str, limit: Duration) -> Result<Vec<IpAddr>> {
    let failed = |problem: String| Problem::Resolve { host: host.to_owned(), problem };
    let program = own_program().map_err(|e| failed(crate::error::chain(&e)))?;
    let process = tokio::process::Command::new(program)
        .arg0(RESOLVER_NAME)
        .arg(host)
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = match tokio::time::timeout(limit, process).await {
        Ok(output) => output.map_err(|e| failed(e.to_string()))?,
        Err(_) => return Err(failed(format!("no answer for {} s", limit.as_secs()))),
    };
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        let said = if said.is_empty() { output.status.to_string() } else { said };
        return Err(failed(trace::shortened(said, 300)));
    }
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(text.lines().filter_map(|line| line.parse().ok()).take(MAX_ADDRESSES).collect())
}

/// The process: one address a line, without repetitions.
pub(crate) fn run(host: &str) -> std::io::Result<String> {
    let mut lines: Vec<String> = Vec::new();
    for address in (host, 0).to_socket_addrs()? {
        let line = address.ip().to_string();
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    Ok(lines.join("\n"))
}
