//! Kernel settings below `/proc/sys`.
//!
//! Invariant: settings below `net/` belong to the network namespace of the calling thread. For
//! another namespace, call these functions inside [`crate::netns::NetNs::run`].

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use rustix::fs::{Mode, OFlags};

use crate::rootfs::new_fs;
use crate::{Error, Result};

const ROOT: &str = "/proc/sys";

/// Whether [`Settings::ensure`] changed the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ensured {
    Written,
    AlreadyThere,
}

/// The value of `name`, without the final newline. Names use slashes
/// (`net/ipv4/conf/eth0.5/arp_notify`), since interface names may contain dots. `ENOENT` if the
/// kernel or the interface has no such setting.
pub fn read(name: &str) -> Result<String> {
    read_opened(name, path_of(name).and_then(File::open))
}

/// Sets `name` to `value`.
pub fn write(name: &str, value: &str) -> Result<()> {
    write_opened(name, path_of(name).and_then(|path| OpenOptions::new().write(true).open(path)), value)
}

/// The settings, for a program that lives about a millisecond: by a /proc of its own that is mounted
/// nowhere.
///
/// The kernel keeps the names that were looked up in a /proc, for each network namespace, and compares
/// a name with those of all others (fs/proc/proc_sysctl.c, `proc_sys_compare`): among 300 namespaces,
/// 0.4 ms for one setting. A new /proc takes 0.04 ms among any number.
#[derive(Debug)]
pub struct Settings {
    /// `/proc/sys`, or the same directory of the own /proc.
    root: OwnedFd,
}

impl Settings {
    /// Without the privilege to mount, the settings of /proc are used. The own /proc is writable, also
    /// where /proc/sys is mounted read-only.
    pub fn open() -> Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let sys = |proc: OwnedFd| rustix::fs::openat(&proc, "sys", flags, Mode::empty());
        let own = new_fs("proc", &[]).ok().and_then(|proc| sys(proc).ok());
        let root = own.map_or_else(|| rustix::fs::open(ROOT, flags, Mode::empty()), Ok);
        root.map(|root| Self { root }).map_err(|e| Error::new("open sysctls", ROOT, e))
    }

    /// As [`read()`].
    pub fn read(&self, name: &str) -> Result<String> {
        read_opened(name, self.at(name, OFlags::RDONLY))
    }

    /// As [`write()`].
    pub fn write(&self, name: &str, value: &str) -> Result<()> {
        write_opened(name, self.at(name, OFlags::WRONLY), value)
    }

    /// Sets `name` to `value` if it differs: a host may allow reading `ip_forward` but not writing it.
    pub fn ensure(&self, name: &str, value: &str) -> Result<Ensured> {
        if self.read(name)? == value {
            return Ok(Ensured::AlreadyThere);
        }
        self.write(name, value).map(|()| Ensured::Written)
    }

    fn at(&self, name: &str, access: OFlags) -> io::Result<File> {
        check_inside(name)?;
        Ok(rustix::fs::openat(&self.root, name, access | OFlags::CLOEXEC, Mode::empty())?.into())
    }
}

/// Without the final newline.
fn read_opened(name: &str, opened: io::Result<File>) -> Result<String> {
    let text = opened.and_then(io::read_to_string).map_err(|e| Error::new("read sysctl", name, e))?;
    Ok(text.trim_end().to_owned())
}

fn write_opened(name: &str, opened: io::Result<File>, value: &str) -> Result<()> {
    opened
        .and_then(|mut file| file.write_all(value.as_bytes()))
        .map_err(|e| Error::new("write sysctl", format_args!("{name}={value}"), e))
}

fn path_of(name: &str) -> io::Result<PathBuf> {
    check_inside(name).map(|()| Path::new(ROOT).join(name))
}

/// `EINVAL` for a name that leads out of the directory.
fn check_inside(name: &str) -> io::Result<()> {
    let is_plain = |part| matches!(part, std::path::Component::Normal(_));
    let is_inside = !name.is_empty() && Path::new(name).components().all(is_plain);
    if is_inside { Ok(()) } else { Err(Errno::EINVAL.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_gives_the_value_without_newline() {
        assert!(["0", "1"].contains(&read("net/ipv4/ip_forward").unwrap().as_str()));
    }

    #[test]
    fn unknown_settings_and_names_outside_are_refused() {
        assert_eq!(read("net/ipv4/no_such_thing").unwrap_err().errno(), Errno::ENOENT);
        assert_eq!(write("../../tmp/x", "1").unwrap_err().errno(), Errno::EINVAL);
        assert_eq!(write("/etc/passwd", "1").unwrap_err().errno(), Errno::EINVAL);
    }

    #[test]
    fn ensure_writes_once_in_a_namespace_of_its_own() {
        assert!(nix::unistd::geteuid().is_root(), "this test makes a network namespace: run it as root");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ns");
        let netns = crate::netns::create_persistent(&path).unwrap();
        let name = "net/ipv4/conf/lo/arp_notify";
        netns
            .run(|| {
                let settings = Settings::open().unwrap();
                assert_eq!(settings.ensure(name, "1").unwrap(), Ensured::Written);
                assert_eq!(settings.ensure(name, "1").unwrap(), Ensured::AlreadyThere);
                settings.write(name, "0").unwrap();
                assert_eq!(read(name).unwrap(), "0");
                assert_eq!(settings.ensure(name, "1").unwrap(), Ensured::Written);
                assert_eq!(
                    settings.write("net/ipv4/conf/none/arp_notify", "1").unwrap_err().errno(),
                    Errno::ENOENT
                );
                assert_eq!(settings.write("../sysrq-trigger", "1").unwrap_err().errno(), Errno::EINVAL);
            })
            .unwrap();
        crate::netns::remove_persistent(&path).unwrap();
    }
}
