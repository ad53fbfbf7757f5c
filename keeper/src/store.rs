//! systemd's descriptor store (sd_notify(3), `FDSTORE=1`): what is held survives this process if the
//! service manager starts it again.
//!
//! Invariant: no call waits. What the service manager does not take at once is not stored, and is lost
//! with this process. But it is told to remove all that it has stored, later if need be: nothing else
//! would end a connection that it holds.
//!
//! Invariant: the service manager can start the next keeper. It passes the names of all descriptors in one
//! string. With a string longer than 128 KiB, the kernel would not execute the keeper: hence [`MOST_NAMES`].

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::log::Log;
use crate::packets;
use crate::wire::{Role, VolumeKey};

/// The first descriptor that a service manager passes (sd_listen_fds(3)).
const FIRST: i32 = 3;
/// More than [`MOST_NAMES`] has room for.
const MOST: i32 = 1 << 13;
/// Bytes of all names, each with a colon: 32 pages of 4 KiB (execve(2), MAX_ARG_STRLEN) less the variable's
/// own name and names of other programs.
const MOST_NAMES: usize = 127 << 10;
/// Of these, for removed files: daemons name as many as they want to.
const MOST_NAMES_OF_REMOVED: usize = 32 << 10;
/// Removed files of one volume that are stored in each second. A daemon that puts and drops removed files for ever
/// does not keep the service manager from its work.
const MOST_REMOVED_A_SECOND: u32 = 256;

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
    /// Bytes of `LISTEN_FDNAMES`.
    fn length(self) -> usize {
        self.to_string().len() + 1
    }

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

/// What the service manager was sent, by this keeper or an earlier one.
#[derive(Debug, Default)]
struct Names {
    stored: BTreeSet<Name>,
    /// It was not yet told to remove these.
    unremoved: BTreeSet<Name>,
    /// Lengths of all of them.
    bytes: usize,
    bytes_of_removed: BTreeMap<VolumeKey, usize>,
    /// Removed files that were added since then.
    added: (Option<Instant>, BTreeMap<VolumeKey, u32>),
}

impl Names {
    fn insert(&mut self, name: Name) {
        if self.stored.insert(name) {
            self.bytes += name.length();
            if let Name::Removed(volume, _) = name {
                *self.bytes_of_removed.entry(volume).or_default() += name.length();
                *self.added.1.entry(volume).or_default() += 1;
            }
        }
    }

    /// The service manager was told to remove it.
    fn is_removed(&mut self, name: Name) {
        self.bytes -= name.length();
        if let Name::Removed(volume, _) = name
            && let Some(bytes) = self.bytes_of_removed.get_mut(&volume)
        {
            *bytes -= name.length();
            if *bytes == 0 {
                self.bytes_of_removed.remove(&volume);
            }
        }
    }

    fn has_room_for(&self, name: Name) -> bool {
        if self.bytes + name.length() > MOST_NAMES {
            return false;
        }
        let Name::Removed(volume, _) = name else { return true };
        let all: usize = self.bytes_of_removed.values().sum();
        let own = self.bytes_of_removed.get(&volume).copied().unwrap_or(0);
        // A volume gets half of what the others leave.
        own + name.length() <= MOST_NAMES_OF_REMOVED.saturating_sub(all)
    }

    /// Whether the volume of a removed file had many of them stored just now.
    fn is_too_soon(&mut self, name: Name) -> bool {
        let Name::Removed(volume, _) = name else { return false };
        let (since, added) = &mut self.added;
        if since.is_none_or(|since| since.elapsed() >= Duration::from_secs(1)) {
            *since = Some(Instant::now());
            added.clear();
        }
        added.get(&volume).is_some_and(|added| *added >= MOST_REMOVED_A_SECOND)
    }
}

/// The connection to the service manager.
#[derive(Debug)]
pub(crate) struct Store {
    socket: OwnedFd,
    log: Log,
    has_failed: Cell<bool>,
    is_full: Cell<bool>,
    names: RefCell<Names>,
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
                is_full: Cell::new(false),
                names: RefCell::default(),
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
        let mut names = self.names.borrow_mut();
        // The removal of an earlier one would remove this one too.
        if names.unremoved.contains(&name) {
            return;
        }
        // A daemon may put and drop removed files for ever: they do not make this fall further behind.
        let is_behind = !names.unremoved.is_empty();
        if matches!(name, Name::Removed(..)) && (is_behind || names.is_too_soon(name)) {
            return;
        }
        if !names.has_room_for(name) {
            // Logged once: it would be repeated for each descriptor.
            if !self.is_full.replace(true) {
                self.log.warn(format_args!(
                    "the service manager cannot pass on more names of descriptors: {name} and others are not stored"
                ));
            }
            return;
        }
        if self.send(&format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}\n"), &[fd]) {
            names.insert(name);
        }
    }

    pub(crate) fn remove(&self, name: Name) {
        if !self.names.borrow_mut().stored.remove(&name) {
            return;
        }
        self.remove_the_rest();
        let mut names = self.names.borrow_mut();
        if names.unremoved.is_empty() && self.remove_as(&name.to_string()) {
            names.is_removed(name);
        } else {
            names.unremoved.insert(name);
        }
    }

    /// Whether it is yet to be told to remove something.
    pub(crate) fn is_behind(&self) -> bool {
        !self.names.borrow().unremoved.is_empty()
    }

    /// What it did not take before.
    pub(crate) fn remove_the_rest(&self) {
        let mut names = self.names.borrow_mut();
        while let Some(name) = names.unremoved.first().copied()
            && self.remove_as(&name.to_string())
        {
            names.unremoved.remove(&name);
            names.is_removed(name);
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
            self.named.iter().for_each(|(name, _)| store.names.borrow_mut().insert(*name));
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
