//! systemd's descriptor store (sd_notify(3), `FDSTORE=1`): what is held survives this process if the
//! service manager starts it again.
//!
//! Invariant: no call waits. What the service manager does not take at once is not stored, and is lost
//! with this process. But it is told to remove all that it has stored, later if need be: nothing else
//! would end a connection that it holds.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::log::Log;
use crate::packets;
use crate::wire::{Role, VolumeKey};

/// The first descriptor that a service manager passes (sd_listen_fds(3)).
const FIRST: i32 = 3;
/// Twice the largest FileDescriptorStoreMax= that is of use.
const MOST: i32 = 1 << 20;

/// What a stored descriptor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Name {
    Role(VolumeKey, Role),
    Removed(VolumeKey, u64),
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Role(volume, role) => write!(f, "{volume}.{}", role.name()),
            Self::Removed(volume, node) => write!(f, "{volume}.{node}"),
        }
    }
}

impl Name {
    fn parse(text: &str) -> Option<Self> {
        let (volume, rest) = text.split_once('.')?;
        let volume = VolumeKey::parse(volume)?;
        let role = Role::ALL.into_iter().find(|role| *role != Role::Daemon && role.name() == rest);
        let name = match role {
            Some(role) => Self::Role(volume, role),
            None => Self::Removed(volume, rest.parse().ok()?),
        };
        (name.to_string() == text).then_some(name)
    }
}

/// The connection to the service manager.
#[derive(Debug)]
pub(crate) struct Store {
    socket: OwnedFd,
    log: Log,
    has_failed: Cell<bool>,
    /// It was sent these, by this keeper or an earlier one.
    stored: RefCell<BTreeSet<Name>>,
    /// It was not yet told to remove these, of what it was sent.
    unremoved: RefCell<BTreeSet<Name>>,
}

impl Store {
    /// `None` if no service manager takes notifications.
    pub(crate) fn of_environment(log: Log) -> Option<Self> {
        let path = std::env::var_os("NOTIFY_SOCKET")?;
        match connect(&path) {
            Ok(socket) => Some(Self {
                socket,
                log,
                has_failed: Cell::new(false),
                stored: RefCell::default(),
                unremoved: RefCell::default(),
            }),
            Err(e) => {
                log.warn(format_args!("connect to NOTIFY_SOCKET {}: {e}", path.display()));
                None
            }
        }
    }

    /// The service has started.
    pub(crate) fn ready(&self) {
        self.send("READY=1\n", &[]);
    }

    /// The service manager drops no descriptor by itself (`FDPOLL=0`).
    pub(crate) fn add(&self, name: Name, fd: BorrowedFd<'_>) {
        self.remove_the_rest();
        // The removal of an earlier one would remove this one too.
        if self.unremoved.borrow().contains(&name) {
            return;
        }
        // A daemon may put and drop removed files for ever: they do not make this fall further behind.
        if matches!(name, Name::Removed(..)) && self.is_behind() {
            return;
        }
        if self.send(&format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}\n"), &[fd]) {
            self.stored.borrow_mut().insert(name);
        }
    }

    pub(crate) fn remove(&self, name: Name) {
        if !self.stored.borrow_mut().remove(&name) {
            return;
        }
        self.remove_the_rest();
        if self.is_behind() || !self.remove_as(&name.to_string()) {
            self.unremoved.borrow_mut().insert(name);
        }
    }

    /// Whether it is yet to be told to remove something.
    pub(crate) fn is_behind(&self) -> bool {
        !self.unremoved.borrow().is_empty()
    }

    /// What it did not take before.
    pub(crate) fn remove_the_rest(&self) {
        let mut unremoved = self.unremoved.borrow_mut();
        while let Some(name) = unremoved.first()
            && self.remove_as(&name.to_string())
        {
            unremoved.pop_first();
        }
    }

    fn remove_as(&self, name: &str) -> bool {
        self.send(&format!("FDSTOREREMOVE=1\nFDNAME={name}\n"), &[])
    }

    /// Whether it was sent.
    fn send(&self, text: &str, fds: &[BorrowedFd<'_>]) -> bool {
        let sent = packets::send(&self.socket, text.as_bytes(), fds);
        // Logged once: it would be repeated for each descriptor.
        if let Err(e) = sent
            && !self.has_failed.replace(true)
        {
            self.log.warn(format_args!("notify the service manager: {e}: some descriptors are not stored"));
        }
        sent.is_ok()
    }
}

fn connect(path: &OsStr) -> Result<OwnedFd, Errno> {
    let address = match path.as_bytes() {
        [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name)?,
        path => SocketAddrUnix::new(path)?,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    rustix::net::connect(&socket, &address)?;
    Ok(socket)
}

/// Descriptors that an earlier keeper has stored. Nothing about them is checked.
#[derive(Debug, Default)]
pub struct Inherited {
    named: Vec<(Name, OwnedFd)>,
    /// Of descriptors that are closed already.
    unknown: Vec<String>,
}

impl Inherited {
    /// Must be called first, and once: the descriptors have fixed numbers.
    pub fn of_environment() -> linux::Result<Self> {
        let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<i32>().ok());
        let is_for_this_process = number("LISTEN_PID") == i32::try_from(std::process::id()).ok();
        let count = number("LISTEN_FDS").filter(|_| is_for_this_process).unwrap_or(0).clamp(0, MOST);
        let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
        let mut names = names.split(':');
        let mut inherited = Self::default();
        for fd in linux::descriptor::take_inherited(FIRST, count)? {
            let name = names.next().unwrap_or_default();
            match Name::parse(name) {
                Some(name) => inherited.named.push((name, fd)),
                None => inherited.unknown.push(name.to_owned()),
            }
        }
        Ok(inherited)
    }

    /// The named ones, those with a role first: a removed file is checked against its volume's
    /// directory. The service manager drops the others.
    pub(crate) fn into_named(mut self, store: Option<&Store>) -> Vec<(Name, OwnedFd)> {
        if let Some(store) = store {
            store.stored.borrow_mut().extend(self.named.iter().map(|(name, _)| *name));
            // What does not reach it is in `unknown` of the next keeper again.
            self.unknown.iter().filter(|name| !name.is_empty()).for_each(|name| {
                store.remove_as(name);
            });
        }
        self.named.sort_by_key(|(name, _)| matches!(name, Name::Removed(..)));
        self.named
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_reads_back_as_it_was_written() {
        let volume = VolumeKey::parse("0123456789abcdef0123456789abcdef").unwrap();
        for name in [
            Name::Role(volume, Role::Connection),
            Name::Role(volume, Role::UsageFile),
            Name::Removed(volume, u64::MAX),
        ] {
            assert_eq!(Name::parse(&name.to_string()), Some(name));
        }
        for text in ["", "stored", "0123456789abcdef0123456789abcdef", "0123456789abcdef0123456789abcdef.x"] {
            assert_eq!(Name::parse(text), None, "{text}");
        }
        assert_eq!(Name::parse("0123456789abcdef0123456789abcdef.+7"), None);
        assert_eq!(Name::parse("0123456789abcdef0123456789abcdef.DAEMON"), None, "never stored");
    }
}
