//! CNI plugin `loopback`: sets `lo` of a network namespace up, and down again. Ignores `CNI_IFNAME`
//! and `CNI_ARGS`, as the reference does.

#![cfg_attr(not(test), no_main)]

use std::net::IpAddr;
use std::path::Path;
use std::process::ExitCode;

use cni_plugin::{CniError, CniResult, Interface, Invocation, IpConfig, Plugin};
use ipnetwork::IpNetwork;
use linux::interface::Interfaces;
use linux::netlink::{Address, Netlink};
use linux::netns::{NetNs, filesystem_magic};
use linux::sysctl::Settings;
use nix::errno::Errno;

/// The index of `lo`, the first link of every namespace (`LOOPBACK_IFINDEX`).
const LO: u32 = 1;

linux::bare_main!(serve);

fn serve() -> ExitCode {
    cni_plugin::run(&Plugin {
        name: "loopback",
        version: env!("CARGO_PKG_VERSION"),
        add: |call| Ok(add(call)?),
        del: |call| Ok(del(call)?),
        check: Some(|call| Ok(check(call)?)),
        status: None,
        gc: None,
    })
}

#[derive(Debug, thiserror::Error)]
enum Error {
    /// Callers match the end of the first of these.
    #[error("failed to Statfs {path:?}: no such file or directory")]
    NetnsMissing { path: String },
    #[error("unknown FS magic on {path:?}: {magic:x}")]
    NotANetns { path: String, magic: i64 },
    #[error("loopback interface found with non-loopback address {:?}", ip.to_string())]
    NotLoopback { ip: IpAddr },
    #[error("loopback interface is down")]
    Down,
    #[error(transparent)]
    Kernel(#[from] linux::Error),
    #[error(transparent)]
    Protocol(#[from] CniError),
    #[error("{cause}")]
    Rollback { cause: Box<Error>, undo: linux::Error },
}

/// A protocol error keeps its code; all others have the reference's 999.
impl From<Error> for CniError {
    fn from(error: Error) -> Self {
        match error {
            Error::Protocol(inner) => inner,
            Error::Rollback { cause, undo } => {
                let left = CniError::chain(&undo).msg;
                CniError::from(*cause).with_details(format_args!("not rolled back: {left}"))
            }
            Error::NetnsMissing { .. }
            | Error::NotANetns { .. }
            | Error::NotLoopback { .. }
            | Error::Down
            | Error::Kernel(_) => CniError::chain(&error),
        }
    }
}

/// The result of the previous plugins, or `lo` with its addresses.
fn add(call: &Invocation) -> Result<CniResult, Error> {
    let prev_result = call.conf.prev_result()?;
    let path = call.netns.as_deref().unwrap_or(Path::new(""));
    let netlink = open(path)?;
    let was_up = Interfaces::open()?.is_up("lo")?;
    match bring_up(&netlink) {
        Ok(addresses) => Ok(prev_result.unwrap_or_else(|| result(path, &addresses))),
        Err(cause) if was_up => Err(cause),
        Err(cause) => Err(match netlink.set_down(LO) {
            Ok(()) => cause,
            Err(undo) => Error::Rollback { cause: Box::new(cause), undo },
        }),
    }
}

/// The addresses of `lo`.
fn bring_up(netlink: &Netlink) -> Result<Vec<Address>, Error> {
    ignore_routers();
    netlink.set_up(LO)?;
    let addresses = netlink.addresses(LO)?;
    match addresses.iter().find(|address| !address.ip.is_loopback()) {
        Some(foreign) => Err(Error::NotLoopback { ip: foreign.ip }),
        None => Ok(addresses),
    }
}

/// If `lo` accepted routes from IPv6 routers, a process with CAP_NET_RAW could send itself
/// advertisements, and so create unlimited routes whose memory the kernel does not charge to it.
fn ignore_routers() {
    let ignored = Settings::open().and_then(|settings| settings.write("net/ipv6/conf/lo/accept_ra", "0"));
    match ignored {
        Ok(()) => {}
        // A kernel without IPv6.
        Err(e) if e.errno() == Errno::ENOENT => {}
        Err(e) => cni_plugin::warn("loopback", format_args!("{e}: {}", e.reason())),
    }
}

/// A missing namespace has no `lo` to set down.
fn del(call: &Invocation) -> Result<(), Error> {
    let Some(path) = call.netns.as_deref() else { return Ok(()) };
    match open(path) {
        Ok(netlink) => Ok(netlink.set_down(LO)?),
        // NotANetns: the file of an unmounted namespace.
        Err(Error::NetnsMissing { .. } | Error::NotANetns { .. }) => Ok(()),
        Err(e) => Err(e),
    }
}

fn check(call: &Invocation) -> Result<(), Error> {
    open(call.netns.as_deref().unwrap_or(Path::new("")))?;
    if Interfaces::open()?.is_up("lo")? { Ok(()) } else { Err(Error::Down) }
}

/// Moves the whole process into the namespace, since it does nothing outside.
fn open(path: &Path) -> Result<Netlink, Error> {
    let netns = NetNs::open(path).map_err(|e| match e.errno() {
        Errno::ENOENT => Error::NetnsMissing { path: path.display().to_string() },
        Errno::EINVAL => Error::NotANetns {
            path: path.display().to_string(),
            magic: filesystem_magic(path).unwrap_or_default(),
        },
        _ => Error::Kernel(e),
    })?;
    netns.enter()?;
    Ok(Netlink::open()?)
}

/// The first address of each family, IPv4 first.
fn result(sandbox: &Path, addresses: &[Address]) -> CniResult {
    let first = |is_v4: bool| addresses.iter().find(|address| address.ip.is_ipv4() == is_v4);
    let ips = [first(true), first(false)].into_iter().flatten().filter_map(|address| {
        let address = IpNetwork::new(address.ip, address.prefix_len).ok()?;
        Some(IpConfig { interface: Some(0), address, gateway: None })
    });
    CniResult {
        interfaces: vec![Interface {
            name: "lo".to_owned(),
            mac: "00:00:00:00:00:00".to_owned(),
            sandbox: sandbox.display().to_string(),
            ..Interface::default()
        }],
        ips: ips.collect(),
        ..CniResult::default()
    }
}
