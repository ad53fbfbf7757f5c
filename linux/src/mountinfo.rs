//! `/proc/<pid>/mountinfo` (proc_pid_mountinfo(5)): what is mounted where.
//!
//! Reading it never touches the mounted file systems, so it is safe where a
//! stat(2) would hang on a dead FUSE server.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use crate::{Error, Result};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry {
    /// Unique among the mounts of the moment, reused later.
    pub mount_id: u64,
    pub parent_id: u64,
    /// `st_dev` of files on it, as major and minor.
    pub major: u32,
    pub minor: u32,
    /// The directory of the file system that is the root of this mount.
    pub root: PathBuf,
    pub mount_point: PathBuf,
    pub options: String,
    /// `shared:N`, `master:N`, ... ; empty for a private mount.
    pub optional_fields: Vec<String>,
    pub fs_type: String,
    pub source: OsString,
    pub super_options: String,
}

impl MountEntry {
    /// Whether two entries show the same directory of the same file system.
    pub fn same_root(&self, other: &Self) -> bool {
        self.major == other.major && self.minor == other.minor && self.root == other.root
    }

    pub fn is_read_only(&self) -> bool {
        self.options.split(',').any(|o| o == "ro")
    }
}

/// The mounts of this thread's mount namespace, in the kernel's order, which
/// does not say which of several at one mount point is visible: [`at`] does.
pub fn read() -> Result<Vec<MountEntry>> {
    read_from(Path::new("/proc/thread-self/mountinfo"))
}

/// The mounts that process `pid` sees.
pub fn read_of(pid: i32) -> Result<Vec<MountEntry>> {
    read_from(Path::new(&format!("/proc/{pid}/mountinfo")))
}

/// What is visibly mounted exactly at `path`; `path` must be absolute and free
/// of symbolic links, as the kernel prints it.
pub fn at(path: &Path) -> Result<Option<MountEntry>> {
    let mut entries = read()?;
    let found = visible_at(&entries, path);
    Ok(found.map(|index| entries.swap_remove(index)))
}

/// Which entry is visibly mounted exactly at `path`. Several may stand there:
/// stacked, or as copies below a shared mount that another one hides (a
/// directory bound on itself). So this goes the way of a path walk, from a mount
/// to the one that is on its next directory.
fn visible_at(entries: &[MountEntry], path: &Path) -> Option<usize> {
    let is_root = |m: &MountEntry| {
        let hangs_on_another = entries.iter().any(|p| p.mount_id == m.parent_id && p.mount_id != m.mount_id);
        m.mount_point == Path::new("/") && !hangs_on_another
    };
    let mut current = entries.iter().rposition(is_root)?;
    // Each step goes one mount down: there are no more steps than mounts.
    for _ in entries {
        let parent_id = entries[current].mount_id;
        let next = entries
            .iter()
            .enumerate()
            .filter(|(_, m)| m.parent_id == parent_id && m.mount_id != parent_id)
            .filter(|(_, m)| path.starts_with(&m.mount_point))
            .min_by_key(|(_, m)| m.mount_point.as_os_str().len());
        match next {
            Some((index, _)) => current = index,
            None => break,
        }
    }
    (entries[current].mount_point == path).then_some(current)
}

fn read_from(path: &Path) -> Result<Vec<MountEntry>> {
    let bytes = std::fs::read(path).map_err(|e| Error::at("read", path, e))?;
    parse(&bytes)
        .ok_or_else(|| Error::at("parse", path, std::io::Error::from(std::io::ErrorKind::InvalidData)))
}

/// `None` when a line has not the documented shape.
pub fn parse(bytes: &[u8]) -> Option<Vec<MountEntry>> {
    bytes.split(|b| *b == b'\n').filter(|l| !l.is_empty()).map(parse_line).collect()
}

fn parse_line(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|b| *b == b' ');
    let mount_id = number(fields.next()?)?;
    let parent_id = number(fields.next()?)?;
    let device = std::str::from_utf8(fields.next()?).ok()?;
    let (major, minor) = device.split_once(':')?;
    let root = PathBuf::from(unescape(fields.next()?));
    let mount_point = PathBuf::from(unescape(fields.next()?));
    let options = text(fields.next()?);
    let mut optional_fields = Vec::new();
    loop {
        match fields.next()? {
            b"-" => break,
            field => optional_fields.push(text(field)),
        }
    }
    Some(MountEntry {
        mount_id,
        parent_id,
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
        root,
        mount_point,
        options,
        optional_fields,
        fs_type: text(fields.next()?),
        source: unescape(fields.next()?),
        super_options: fields.next().map(text).unwrap_or_default(),
    })
}

fn number(field: &[u8]) -> Option<u64> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

fn text(field: &[u8]) -> String {
    String::from_utf8_lossy(unescape(field).as_bytes()).into_owned()
}

/// seq_path() writes space, tab, newline and backslash as three octal digits.
fn unescape(field: &[u8]) -> OsString {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        match rest {
            [b'\\', a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', tail @ ..] => {
                out.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = tail;
            }
            _ => {
                out.push(*first);
                rest = tail;
            }
        }
    }
    OsString::from_vec(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_with_optional_fields_and_octal_escapes_is_understood() {
        let line = b"36 35 98:0 /mnt1 /mnt\\040two\\134x rw,noatime master:1 shared:7 - ext3 /dev/root rw,errors=continue\n";
        let [entry] = &parse(line).unwrap()[..] else { panic!("one entry") };
        assert_eq!(entry.mount_point, Path::new("/mnt two\\x"));
        assert_eq!(entry.root, Path::new("/mnt1"));
        assert_eq!((entry.major, entry.minor), (98, 0));
        assert_eq!(entry.optional_fields, ["master:1", "shared:7"]);
        assert_eq!(entry.fs_type, "ext3");
        assert_eq!(entry.super_options, "rw,errors=continue");
    }

    /// A directory of a shared root, bound on itself; a mount below it stands in
    /// the table twice, and the copy that the bound directory hides comes last.
    #[test]
    fn of_a_mount_and_its_hidden_copy_the_visible_one_is_found() {
        let table = b"20 1 8:1 / / rw shared:1 - ext4 /dev/a rw\n\
            30 20 8:1 /k /k rw shared:1 - ext4 /dev/a rw\n\
            41 30 0:50 / /k/m ro shared:9 - fuse.x x rw\n\
            40 20 0:50 / /k/m rw shared:9 - fuse.x x rw\n\
            50 20 0:60 / /n rw - tmpfs t rw\n\
            51 50 0:61 / /n rw - tmpfs upon rw\n";
        let entries = parse(table).unwrap();
        let found = |path: &str| visible_at(&entries, Path::new(path)).map(|index| entries[index].mount_id);
        assert_eq!(found("/k/m"), Some(41));
        assert_eq!(found("/n"), Some(51), "the upper of two");
        assert_eq!(found("/k"), Some(30));
        assert_eq!(found("/"), Some(20));
        assert_eq!(found("/k/m/below"), None);
        assert_eq!(found("/kk"), None);
    }

    #[test]
    fn a_torn_line_is_refused() {
        assert_eq!(parse(b"36 35 98:0 /mnt1 /mnt"), None);
    }

    #[test]
    fn the_kernels_own_table_is_understood() {
        assert!(read().unwrap().iter().any(|m| m.mount_point == Path::new("/")));
    }
}
