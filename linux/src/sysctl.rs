//! Kernel settings below `/proc/sys`.
//!
//! Invariant: settings below `net/` belong to the network namespace of the calling thread. For
//! another namespace, call these functions inside [`crate::netns::NetNs::run`].

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

use nix::errno::Errno;

use crate::{Error, Result};

const ROOT: &str = "/proc/sys";

/// Whether [`ensure`] changed the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ensured {
    Written,
    AlreadyThere,
}

/// The value of `name`, without the final newline. Names use slashes
/// (`net/ipv4/conf/eth0.5/arp_notify`), since interface names may contain dots. `ENOENT` if the
/// kernel or the interface has no such setting.
pub fn read(name: &str) -> Result<String> {
    let path = path_of("read sysctl", name)?;
    let text = std::fs::read_to_string(&path).map_err(|e| Error::new("read sysctl", name, e))?;
    Ok(text.trim_end().to_owned())
}

/// Sets `name` to `value`.
pub fn write(name: &str, value: &str) -> Result<()> {
    let path = path_of("write sysctl", name)?;
    OpenOptions::new()
        .write(true)
        .open(&path)
        .and_then(|mut file| file.write_all(value.as_bytes()))
        .map_err(|e| Error::new("write sysctl", format_args!("{name}={value}"), e))
}

/// Sets `name` to `value` if it differs: a host may allow reading `ip_forward` but not writing it.
pub fn ensure(name: &str, value: &str) -> Result<Ensured> {
    if read(name)? == value {
        return Ok(Ensured::AlreadyThere);
    }
    write(name, value).map(|()| Ensured::Written)
}

/// `EINVAL` for a name that leads out of `/proc/sys`.
fn path_of(op: &'static str, name: &str) -> Result<PathBuf> {
    let inside = Path::new(name).components().all(|part| matches!(part, std::path::Component::Normal(_)));
    if name.is_empty() || !inside {
        return Err(Error::new(op, name, Errno::EINVAL));
    }
    Ok(Path::new(ROOT).join(name))
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
        let (first, second) = netns.run(|| (ensure(name, "1").unwrap(), ensure(name, "1").unwrap())).unwrap();
        assert_eq!((first, second), (Ensured::Written, Ensured::AlreadyThere));
        crate::netns::remove_persistent(&path).unwrap();
    }
}
