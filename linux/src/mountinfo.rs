//! `/proc/<pid>/mountinfo` (proc_pid_mountinfo(5)): all mounts and their places.
//!
//! Reading it sends no request to the mounted file systems, so it is safe where stat(2) would hang
//! on a dead FUSE server.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Read as _;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use crate::{Error, Result};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry {
    /// Unique among the current mounts; reused later.
    pub mount_id: u64,
    pub parent_id: u64,
    /// `st_dev` of files on it, as major and minor.
    pub major: u32,
    pub minor: u32,
    /// The directory of the file system that is this mount's root.
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

/// The mounts of this thread's mount namespace, in the kernel's order. The order does not show
/// which of several mounts at one mount point is visible: [`at`] does.
pub fn read() -> Result<Vec<MountEntry>> {
    read_from(Path::new(OF_THIS_THREAD))
}

/// The mounts that process `pid` sees.
pub fn read_of(pid: i32) -> Result<Vec<MountEntry>> {
    read_from(Path::new(&format!("/proc/{pid}/mountinfo")))
}

/// The table in a file such as `/proc/<pid>/task/<tid>/mountinfo`.
pub fn read_at(table: &Path) -> Result<Vec<MountEntry>> {
    read_from(table)
}

/// The mount points inside the file system with these device numbers: paths from its root, without
/// a leading slash. `entries` are of one mount namespace.
pub fn mounted_inside(entries: &[MountEntry], (major, minor): (u32, u32)) -> Vec<PathBuf> {
    let is_it = |entry: &&MountEntry| (entry.major, entry.minor) == (major, minor);
    let mounts: HashMap<u64, &MountEntry> =
        entries.iter().filter(is_it).map(|entry| (entry.mount_id, entry)).collect();
    let inside = |entry: &MountEntry| {
        let mount = mounts.get(&entry.parent_id).filter(|mount| mount.mount_id != entry.mount_id)?;
        let below = entry.mount_point.strip_prefix(&mount.mount_point).ok()?;
        // A stacked mount is on the directory that the mount below shows.
        let path = if below.as_os_str().is_empty() { mount.root.clone() } else { mount.root.join(below) };
        Some(path.strip_prefix("/").map(Path::to_owned).unwrap_or(path))
    };
    entries.iter().filter_map(inside).collect()
}

/// The visible mount exactly at `path`, which must be absolute and without symbolic links, as the
/// kernel prints it.
pub fn at(path: &Path) -> Result<Option<MountEntry>> {
    let table = Path::new(OF_THIS_THREAD);
    let bytes = bytes_of(table)?;
    let places: Option<Vec<Place<'_>>> = lines(&bytes).map(Place::parse).collect();
    let places = places.ok_or_else(|| misshapen(table))?;
    let found = visible_at(&places, path).map(|index| parse_line(places[index].line));
    found.map(|entry| entry.ok_or_else(|| misshapen(table))).transpose()
}

/// The mount with this id, visible or not; `None` if it is not in this mount namespace.
pub fn of_id(mount_id: u64) -> Result<Option<MountEntry>> {
    let table = Path::new(OF_THIS_THREAD);
    let bytes = bytes_of(table)?;
    let is_it = |line: &&[u8]| line.split(|b| *b == b' ').next().and_then(number) == Some(mount_id);
    let found = lines(&bytes).find(is_it).map(parse_line);
    found.map(|entry| entry.ok_or_else(|| misshapen(table))).transpose()
}

/// The mounts whose mount points are at or below `path`, visible or not. No link is followed.
pub fn below(path: &Path) -> Result<Vec<MountEntry>> {
    read_where(|line| Some(Place::parse(line)?.mount_point.starts_with(path)))
}

/// The deepest mount point at or above `path`, by comparing text: no link is followed.
pub fn point_above(path: &Path) -> Result<PathBuf> {
    let above = read_where(|line| Some(path.starts_with(Place::parse(line)?.mount_point)))?;
    let points = above.into_iter().map(|mount| mount.mount_point);
    Ok(points.max_by_key(|point| point.as_os_str().len()).unwrap_or_else(|| PathBuf::from("/")))
}

/// The lines of the mounts of these types, as the kernel writes them: for [`parse`].
pub fn text_of_types(types: &[&str]) -> Result<Vec<u8>> {
    let table = Path::new(OF_THIS_THREAD);
    let bytes = bytes_of(table)?;
    Ok(lines_of_types(&bytes, types))
}

fn lines_of_types(table: &[u8], types: &[&str]) -> Vec<u8> {
    let is_wanted = |line: &&[u8]| {
        type_of(line).is_some_and(|found| types.iter().any(|wanted| wanted.as_bytes() == found))
    };
    let mut text = Vec::new();
    for line in lines(table).filter(is_wanted) {
        text.extend_from_slice(line);
        text.push(b'\n');
    }
    text
}

/// The mounts whose source is `source`, visible or not.
pub fn from_source(source: &OsStr) -> Result<Vec<MountEntry>> {
    read_where(|line| Some(unescape(source_of(line)?) == source))
}

/// Parses only the wanted lines: a node with hundreds of volumes has hundreds of lines, and few are
/// needed. `None` for a line that does not have the documented form.
fn read_where(is_wanted: impl Fn(&[u8]) -> Option<bool>) -> Result<Vec<MountEntry>> {
    let table = Path::new(OF_THIS_THREAD);
    let bytes = bytes_of(table)?;
    let wanted = lines(&bytes).filter_map(|line| match is_wanted(line) {
        Some(false) => None,
        Some(true) => Some(parse_line(line)),
        None => Some(None),
    });
    wanted.collect::<Option<_>>().ok_or_else(|| misshapen(table))
}

/// The field as it is written.
fn source_of(line: &[u8]) -> Option<&[u8]> {
    last_fields(line).nth(1)
}

/// The field as it is written.
fn type_of(line: &[u8]) -> Option<&[u8]> {
    last_fields(line).next()
}

/// Type, source and the file system's options.
fn last_fields(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    // Six fields, then the optional ones until the hyphen.
    line.split(|b| *b == b' ').skip(6).skip_while(|field| *field != b"-").skip(1)
}

/// The fields that locate a mount. Only these are parsed for most lines, since a node with hundreds
/// of volumes has hundreds of lines.
struct Place<'a> {
    mount_id: u64,
    parent_id: u64,
    mount_point: Cow<'a, Path>,
    line: &'a [u8],
}

impl<'a> Place<'a> {
    fn parse(line: &'a [u8]) -> Option<Self> {
        let mut fields = line.split(|b| *b == b' ');
        let (mount_id, parent_id) = (number(fields.next()?)?, number(fields.next()?)?);
        let mount_point = fields.nth(2)?;
        let mount_point = if mount_point.contains(&b'\\') {
            Cow::Owned(PathBuf::from(unescape(mount_point)))
        } else {
            Cow::Borrowed(Path::new(OsStr::from_bytes(mount_point)))
        };
        Some(Self { mount_id, parent_id, mount_point, line })
    }
}

/// The entry that is visible exactly at `path`. There may be several: stacked, or copies below a
/// shared mount that another mount covers (a directory bound on itself). So this follows a path
/// walk, from a mount to the one on its next directory.
fn visible_at(entries: &[Place<'_>], path: &Path) -> Option<usize> {
    let is_root = |m: &Place<'_>| {
        let hangs_on_another = entries.iter().any(|p| p.mount_id == m.parent_id && p.mount_id != m.mount_id);
        m.mount_point == Path::new("/") && !hangs_on_another
    };
    let mut current = entries.iter().rposition(is_root)?;
    // Each step goes one mount down, so there are at most as many steps as mounts.
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

const OF_THIS_THREAD: &str = "/proc/thread-self/mountinfo";
/// The kernel does not report the table's length; most tables are shorter.
const USUAL_BYTES: usize = 64 << 10;

fn read_from(path: &Path) -> Result<Vec<MountEntry>> {
    parse(&bytes_of(path)?).ok_or_else(|| misshapen(path))
}

fn bytes_of(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(USUAL_BYTES);
    File::open(path)
        .and_then(|mut file| file.read_to_end(&mut bytes))
        .map_err(|e| Error::at("read", path, e))?;
    Ok(bytes)
}

fn misshapen(path: &Path) -> Error {
    Error::at("parse", path, std::io::Error::from(std::io::ErrorKind::InvalidData))
}

fn lines(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    bytes.split(|b| *b == b'\n').filter(|line| !line.is_empty())
}

/// `None` if a line does not have the documented form.
pub fn parse(bytes: &[u8]) -> Option<Vec<MountEntry>> {
    lines(bytes).map(parse_line).collect()
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
    fn mounts_inside_a_file_system_are_named_from_its_root() {
        let table = b"20 1 0:50 / /volume rw - fuse.hawser v rw\n\
            21 1 0:50 /sub /pod/part rw - fuse.hawser v rw\n\
            30 20 0:60 / /volume/d/dir rw - tmpfs t rw\n\
            31 21 8:1 /secret /pod/part/a\\040file rw - ext4 /dev/a rw\n\
            32 1 0:61 / /volume2/d rw - tmpfs t rw\n\
            33 30 0:62 / /volume/d/dir/deeper rw - tmpfs t rw\n";
        let found = mounted_inside(&parse(table).unwrap(), (0, 50));
        assert_eq!(found, [Path::new("d/dir"), Path::new("sub/a file")]);
    }

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
            51 50 0:61 / /n rw - tmpfs upon rw\n\
            60 20 0:62 / /with\\040space rw - tmpfs t rw\n";
        let entries: Vec<Place<'_>> = lines(table).map(|line| Place::parse(line).unwrap()).collect();
        let found = |path: &str| visible_at(&entries, Path::new(path)).map(|index| entries[index].mount_id);
        assert_eq!(found("/k/m"), Some(41));
        assert_eq!(found("/n"), Some(51), "the upper of two");
        assert_eq!(found("/k"), Some(30));
        assert_eq!(found("/"), Some(20));
        assert_eq!(found("/k/m/below"), None);
        assert_eq!(found("/kk"), None);
        assert_eq!(found("/with space"), Some(60));
    }

    #[test]
    fn the_lines_of_some_types_are_kept_as_they_are() {
        let table = b"20 1 8:1 / / rw shared:1 - ext4 cgroup rw\n\
            30 20 0:50 / /sys/fs/cgroup rw - cgroup2 none rw\n\
            31 20 0:51 / /v1\\040a rw master:1 shared:7 - cgroup cgroup rw,cpu\n\
            40 20 0:60 / /pods/a ro - tmpfs cgroup2 rw\n";
        let kept = lines_of_types(table, &["cgroup", "cgroup2"]);
        assert_eq!(
            String::from_utf8(kept).unwrap(),
            "30 20 0:50 / /sys/fs/cgroup rw - cgroup2 none rw\n\
             31 20 0:51 / /v1\\040a rw master:1 shared:7 - cgroup cgroup rw,cpu\n"
        );
    }

    #[test]
    fn the_source_is_found_behind_any_optional_fields() {
        for optional in ["", "shared:7 ", "master:1 shared:7 "] {
            let line = format!("36 35 98:0 / /mnt rw {optional}- ext3 a\\040b rw");
            assert_eq!(source_of(line.as_bytes()), Some(&b"a\\040b"[..]), "{line}");
        }
        assert_eq!(source_of(b"36 35 98:0 / /mnt rw shared:7"), None);
    }

    #[test]
    fn mounts_are_found_by_their_source_and_above_a_path() {
        let proc = at(Path::new("/proc")).unwrap().unwrap();
        let mut of_source = read().unwrap();
        of_source.retain(|mount| mount.source == proc.source);
        assert_eq!(from_source(&proc.source).unwrap(), of_source);
        assert_eq!(point_above(Path::new("/proc/self/fd")).unwrap(), Path::new("/proc"));
        assert_eq!(point_above(Path::new("/procedure")).unwrap(), Path::new("/"));
    }

    #[test]
    fn a_torn_line_is_refused() {
        assert_eq!(parse(b"36 35 98:0 /mnt1 /mnt"), None);
        assert!(Place::parse(b"36 35 98:0 /mnt1").is_none());
    }

    #[test]
    fn the_kernels_own_table_is_understood() {
        let all = read().unwrap();
        let root = at(Path::new("/")).unwrap().unwrap();
        assert!(root.mount_point == Path::new("/") && all.contains(&root));
    }
}
