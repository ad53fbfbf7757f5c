//! Unpacks one layer from a tar stream into a directory that overlayfs uses as a lower layer
//! (whiteouts become 0:0 devices and opaque marks).
//!
//! Invariant: every path is resolved below the layer's root with
//! openat2(RESOLVE_IN_ROOT), so no entry and no link can reach outside.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use flate2::bufread::MultiGzDecoder;
use linux::rootfs;
use nix::errno::Errno;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Timespec, Timestamps, Uid, XattrFlags};
use sha2::{Digest, Sha256};
use tar::EntryType;

use super::error::{ImageError, Result};
use super::job::Job;
use super::limits::{Allowance, ImageLimits, Limited, Used};
use super::zstd;

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// Unpacks `blob` into the directory of `job`, unless that is done already. Checks the blob's
/// digest, and the digest of the unpacked stream against the image configuration.
pub(crate) fn unpack(blob: impl Read, job: &Job) -> Result<Used> {
    let (digest, diff_id, limits) = (&job.digest, &job.diff_id, &job.limits);
    let mut compressed = BufReader::with_capacity(128 << 10, Hashed::new(blob));
    let start =
        io::BufRead::fill_buf(&mut compressed).map_err(ImageError::reading(format!("blob {digest}")))?;
    let (gzip, zstd) = (start.starts_with(&GZIP_MAGIC), zstd::is_start(start));
    let plain: Box<dyn Read + '_> = if gzip {
        Box::new(MultiGzDecoder::new(&mut compressed))
    } else if zstd {
        Box::new(zstd::Frames::new(&mut compressed))
    } else {
        Box::new(&mut compressed)
    };
    let left = Allowance::unlimited();
    let most = limits.unpacked_bytes.saturating_sub(job.used.unpacked_bytes).saturating_add(1);
    left.set(most);
    let header = Allowance::unlimited();
    let mut plain = Limited::new(Hashed::new(Limited::new(plain, left.clone())), header.clone());
    let mut used = job.used;
    let unpacked = if job.is_unpacked { Ok(()) } else { extract(&mut plain, job, &header, &mut used) };
    let named = |problem: ImageError| {
        if left.is_used_up() { limits.too_many_bytes() } else { problem }
    };
    unpacked.map_err(named)?;
    // The tar ends before the stream does (padding); the digests cover the whole stream.
    header.set(u64::MAX);
    let drained = io::copy(&mut plain, &mut io::sink());
    let found_diff_id = plain.into_inner().finish();
    let drained = drained.and_then(|_| io::copy(&mut compressed, &mut io::sink()));
    drained.map_err(|e| named(ImageError::reading(format!("blob {digest}"))(e)))?;
    let found = compressed.into_inner().finish();
    if found != *digest {
        return Err(ImageError::OtherDigest { wanted: digest.clone(), found });
    }
    if found_diff_id != *diff_id {
        let (digest, wanted) = (digest.clone(), diff_id.clone());
        return Err(ImageError::OtherDiffId { digest, found: found_diff_id, wanted });
    }
    // Headers and bytes behind the tar's end are only in the stream; holes of sparse files are only
    // in the entries.
    let in_entries = used.unpacked_bytes - job.used.unpacked_bytes;
    Ok(Used { unpacked_bytes: in_entries.max(most - left.left()), entries: used.entries - job.used.entries })
}

/// Longest run of blocks between the end of one entry's content and the next header.
const PADDING: u64 = 1024;

/// Each takes about 1.5 KiB of kernel memory, which the unpacker's control group is charged with
/// and which cannot be reclaimed before it is on disk.
const ENTRIES_A_SYNC: u64 = 50_000;

fn write_back(target: &Path) -> Result<()> {
    let directory = File::open(target).map_err(ImageError::io("open the layer's directory"))?;
    rustix::fs::syncfs(directory).map_err(ImageError::io("write the layer back"))
}

fn extract(stream: impl Read, job: &Job, header: &Allowance, used: &mut Used) -> Result<()> {
    let limits = &job.limits;
    let root = rootfs::open_root(&job.target)?;
    let mut archive = tar::Archive::new(stream);
    let mut dir_times: Vec<(PathBuf, i64)> = Vec::new();
    let mut entries = archive.entries().map_err(ImageError::reading("tar"))?;
    loop {
        header.set(limits.header_bytes.saturating_add(PADDING));
        let Some(entry) = entries.next() else { break };
        let mut entry = entry.map_err(|e| {
            if header.is_used_up() { limits.header_too_large() } else { ImageError::reading("tar")(e) }
        })?;
        header.set(u64::MAX);
        // Holes of a sparse file are not in the stream.
        used.add(Used { unpacked_bytes: entry.size(), entries: 1 });
        used.check(limits)?;
        let path = entry.path().map_err(ImageError::io("tar entry name"))?.into_owned();
        place(&root, &mut entry, &path, limits).map_err(|problem| problem.within(shown(&path)))?;
        if entry.header().entry_type() == EntryType::Directory {
            dir_times.push((path, mtime(&entry)));
        }
        // Skips the rest, so that the next read is a header.
        io::copy(&mut entry, &mut io::sink()).map_err(ImageError::reading("tar"))?;
        if used.entries.is_multiple_of(ENTRIES_A_SYNC) {
            write_back(&job.target)?;
        }
    }
    // Last: adding entries to a directory changes its times.
    for (path, seconds) in dir_times {
        let made = match rootfs::open_in_root(&root, &path) {
            Ok(made) => made,
            // A later entry replaced or hid it.
            Err(e) if matches!(e.errno(), Errno::ENOENT | Errno::ENOTDIR) => continue,
            Err(e) => return Err(ImageError::from(e).within(shown(&path))),
        };
        let name = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&made));
        rustix::fs::utimensat(rustix::fs::CWD, &*name, &times(seconds), AtFlags::empty())
            .map_err(|e| ImageError::io("set time")(e).within(shown(&path)))?;
    }
    Ok(())
}

/// The beginning of a name, which may have a megabyte.
fn shown(path: &Path) -> String {
    const SHOWN: usize = 200;
    let text = path.display().to_string();
    if text.len() <= SHOWN { text } else { format!("{}...", &text[..text.floor_char_boundary(SHOWN)]) }
}

/// Number of directories between the root and `dir`, after links were followed.
fn depth_below(root: &OwnedFd, dir: &OwnedFd) -> Option<usize> {
    let place = |fd: &OwnedFd| {
        let name = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(fd));
        std::fs::read_link(name).ok()
    };
    // A path longer than a page cannot be read: then it is too deep.
    Some(place(dir)?.strip_prefix(place(root)?).ok()?.components().count())
}

fn place(
    root: &OwnedFd,
    entry: &mut tar::Entry<'_, impl Read>,
    path: &Path,
    limits: &ImageLimits,
) -> Result<()> {
    let relative: PathBuf = path
        .components()
        .filter(|c| !matches!(c, Component::CurDir | Component::RootDir))
        .map(|c| match c {
            Component::Normal(name) => Ok(name),
            _ => Err(ImageError::OutOfLayer),
        })
        .collect::<Result<_>>()?;
    if relative.components().count() > limits.depth {
        return Err(limits.too_deep());
    }
    let Some(name) = relative.file_name() else {
        return set_owner_and_mode(root, entry, Path::new(".")); // the root directory itself
    };
    let parent_path = relative.parent().unwrap_or(Path::new(""));
    let parent = rootfs::ensure_in_root(root, parent_path, rootfs::Kind::Directory)?;
    // Links in the layer may lead deeper than the name shows.
    if depth_below(root, &parent).is_none_or(|depth| depth >= limits.depth) {
        return Err(limits.too_deep());
    }
    if name.as_bytes() == OPAQUE {
        return set_xattr(&parent, rootfs::OPAQUE_ATTRIBUTE, b"y");
    }
    if let Some(hidden) = name.as_bytes().strip_prefix(WHITEOUT) {
        if matches!(hidden, b"" | b"." | b"..") {
            // Removing ".." would reach the directory of all layers.
            return Err(ImageError::EmptyWhiteout);
        }
        let hidden = std::ffi::OsStr::from_bytes(hidden);
        remove_existing(&parent, hidden)?;
        return rustix::fs::mknodat(&parent, hidden, FileType::CharacterDevice, Mode::empty(), 0)
            .map_err(ImageError::io("make whiteout"));
    }
    make(root, &parent, Path::new(name), entry)?;
    Ok(())
}

fn make(root: &OwnedFd, parent: &OwnedFd, name: &Path, entry: &mut tar::Entry<'_, impl Read>) -> Result<()> {
    let kind = entry.header().entry_type();
    if kind == EntryType::Directory {
        if !is_directory(parent, name) {
            // A link with this name is replaced, because its target belongs to another layer.
            remove_existing(parent, name.as_os_str())?;
            rustix::fs::mkdirat(parent, name, Mode::from(0o755)).map_err(ImageError::io("make directory"))?;
        }
        return finish(parent, name, entry);
    }
    remove_existing(parent, name.as_os_str())?;
    match kind {
        EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let file = rustix::fs::openat(parent, name, flags, Mode::from(0o600))
                .map_err(ImageError::io("create file"))?;
            io::copy(entry, &mut File::from(file)).map_err(ImageError::io("write"))?;
        }
        EntryType::Symlink => {
            let target = link_name(entry)?;
            rustix::fs::symlinkat(&target, parent, name).map_err(ImageError::io("make symbolic link"))?;
        }
        EntryType::Link => {
            // The hard link gets owner and mode from its target, which is complete.
            let target = link_name(entry)?;
            let (dir, file) = (target.parent().unwrap_or(Path::new("")), target.file_name());
            let file = file.ok_or_else(|| ImageError::HardLink { target: target.clone() })?;
            let dir =
                rootfs::open_in_root(root, if dir.as_os_str().is_empty() { Path::new(".") } else { dir })?;
            return rustix::fs::linkat(&dir, file, parent, name, AtFlags::empty())
                .map_err(ImageError::io("make hard link"));
        }
        EntryType::Fifo => {
            rustix::fs::mknodat(parent, name, FileType::Fifo, Mode::from(0o600), 0)
                .map_err(ImageError::io("make fifo"))?;
        }
        EntryType::Char | EntryType::Block => {
            let number = |n: io::Result<Option<u32>>| n.ok().flatten().ok_or(ImageError::DeviceNumbers);
            let (major, minor) =
                (number(entry.header().device_major())?, number(entry.header().device_minor())?);
            let node =
                if kind == EntryType::Char { FileType::CharacterDevice } else { FileType::BlockDevice };
            rustix::fs::mknodat(parent, name, node, Mode::from(0o600), rustix::fs::makedev(major, minor))
                .map_err(ImageError::io("make device"))?;
        }
        EntryType::XGlobalHeader => return Ok(()),
        kind => return Err(ImageError::EntryType { kind }),
    }
    finish(parent, name, entry)
}

/// Sets owner, mode, extended attributes and times of the new entry.
fn finish(parent: &OwnedFd, name: &Path, entry: &mut tar::Entry<'_, impl Read>) -> Result<()> {
    set_owner_and_mode(parent, entry, name)?;
    let attributes: Vec<(String, Vec<u8>)> = entry
        .pax_extensions()
        .map_err(ImageError::io("pax header"))?
        .into_iter()
        .flatten()
        .filter_map(|x| x.ok())
        .filter_map(|x| {
            Some((x.key().ok()?.strip_prefix("SCHILY.xattr.")?.to_owned(), x.value_bytes().to_vec()))
        })
        .collect();
    if !attributes.is_empty() && entry.header().entry_type() != EntryType::Symlink {
        let made = rootfs::open_in_root(parent, name)?;
        for (key, value) in attributes {
            // A layer must not set overlayfs attributes other than through whiteouts.
            if !key.starts_with("trusted.overlay.") && !key.starts_with("user.overlay.") {
                set_xattr(&made, &key, &value)?;
            }
        }
    }
    rustix::fs::utimensat(parent, name, &times(mtime(entry)), AtFlags::SYMLINK_NOFOLLOW)
        .map_err(ImageError::io("set time"))
}

fn set_owner_and_mode(parent: &OwnedFd, entry: &tar::Entry<'_, impl Read>, name: &Path) -> Result<()> {
    let header = entry.header();
    let id = |n: io::Result<u64>| {
        n.ok().and_then(|n| u32::try_from(n).ok()).filter(|n| *n != u32::MAX).ok_or(ImageError::Owner)
    };
    let (uid, gid) = (Uid::from_raw(id(header.uid())?), Gid::from_raw(id(header.gid())?));
    rustix::fs::chownat(parent, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
        .map_err(ImageError::io("set owner"))?;
    if header.entry_type() != EntryType::Symlink {
        // After the owner: chown(2) clears set-user-id bits.
        let mode = header.mode().map_err(ImageError::io("mode"))? & 0o7777;
        rustix::fs::chmodat(parent, name, Mode::from(mode), AtFlags::empty())
            .map_err(ImageError::io("set mode"))?;
    }
    Ok(())
}

/// Whether `name` is a directory itself, not a link to one.
fn is_directory(parent: &OwnedFd, name: &Path) -> bool {
    rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
}

/// A later entry replaces an earlier one of the same name, directories included.
fn remove_existing(parent: &OwnedFd, name: &std::ffi::OsStr) -> Result<()> {
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => Ok(()),
        Err(rustix::io::Errno::ISDIR) => {
            let replaced = CString::new(name.as_bytes()).map_err(ImageError::io("replace directory"))?;
            linux::tree::remove_in(parent.as_fd(), &replaced, Path::new(name))
                .map_err(|e| ImageError::from(e).within("replace directory"))
        }
        Err(e) => Err(ImageError::io("replace")(e)),
    }
}

fn link_name(entry: &tar::Entry<'_, impl Read>) -> Result<PathBuf> {
    match entry.link_name() {
        Ok(Some(target)) => Ok(target.into_owned()),
        Ok(None) => Err(ImageError::NoTarget),
        Err(e) => Err(ImageError::io("link target")(e)),
    }
}

fn set_xattr(fd: impl AsFd, key: &str, value: &[u8]) -> Result<()> {
    // The descriptor is O_PATH, which fsetxattr(2) refuses; its /proc name is as good.
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd.as_fd()));
    rustix::fs::setxattr(&*path, key, value, XattrFlags::empty())
        .map_err(|e| ImageError::Attribute { key: key.to_owned(), source: e.into() })
}

fn mtime(entry: &tar::Entry<'_, impl Read>) -> i64 {
    entry.header().mtime().ok().and_then(|t| i64::try_from(t).ok()).unwrap_or(0)
}

fn times(seconds: i64) -> Timestamps {
    let time = Timespec { tv_sec: seconds, tv_nsec: 0 };
    Timestamps { last_access: time, last_modification: time }
}

/// A reader that knows the sha256 of what went through.
struct Hashed<R> {
    inner: R,
    hash: Sha256,
}

impl<R> Hashed<R> {
    fn new(inner: R) -> Self {
        Self { inner, hash: Sha256::new() }
    }

    fn finish(self) -> String {
        format!("sha256:{}", base16ct::lower::encode_string(&self.hash.finalize()))
    }
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.inner.read(buffer)?;
        self.hash.update(&buffer[..length]);
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use super::super::source::Blob;
    use super::*;
    use crate::error::chain;

    fn entry(builder: &mut tar::Builder<Vec<u8>>, path: &str, kind: EntryType, content: &[u8], link: &str) {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_size(content.len() as u64);
        // Names as an attacker writes them: past the checks of the builder.
        header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_cksum();
        builder.append(&header, content).unwrap();
    }

    fn sum(bytes: &[u8]) -> String {
        format!("sha256:{}", base16ct::lower::encode_string(&Sha256::digest(bytes)))
    }

    fn job(layer: &[u8], target: &Path, limits: ImageLimits) -> Job {
        Job {
            blob: Blob { place: PathBuf::new(), inner: None, offset: 0, size: layer.len() as u64 },
            is_checked: false,
            digest: sum(layer),
            diff_id: sum(layer),
            is_unpacked: false,
            target: target.to_owned(),
            limits,
            used: Used::default(),
        }
    }

    fn unpacked(layer: &[u8]) -> (tempfile::TempDir, Result<()>) {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("layer");
        std::fs::create_dir(&root).unwrap();
        let result = unpack(layer, &job(layer, &root, ImageLimits::default())).map(drop);
        (dir, result)
    }

    #[test]
    fn whiteouts_become_what_overlayfs_understands() {
        use std::os::unix::fs::{FileTypeExt, MetadataExt};
        let mut tar = tar::Builder::new(Vec::new());
        entry(&mut tar, "etc/.wh.gone", EntryType::Regular, b"", "");
        entry(&mut tar, "var/.wh..wh..opq", EntryType::Regular, b"", "");
        entry(&mut tar, "var/new", EntryType::Regular, b"text", "");
        let (dir, result) = unpacked(&tar.into_inner().unwrap());
        result.unwrap();
        let gone = std::fs::symlink_metadata(dir.path().join("layer/etc/gone")).unwrap();
        assert!(gone.file_type().is_char_device() && gone.rdev() == 0);
        let mut value = [0; 8];
        let length =
            rustix::fs::getxattr(dir.path().join("layer/var"), "trusted.overlay.opaque", &mut value).unwrap();
        assert_eq!(&value[..length], b"y");
        assert_eq!(std::fs::read(dir.path().join("layer/var/new")).unwrap(), b"text");
    }

    #[test]
    fn links_cannot_carry_an_entry_outside_the_layer() {
        let mut tar = tar::Builder::new(Vec::new());
        entry(&mut tar, "out", EntryType::Symlink, b"", "../..");
        entry(&mut tar, "out/escaped", EntryType::Regular, b"x", "");
        entry(&mut tar, "abs", EntryType::Symlink, b"", "/tmp-of-layer");
        entry(&mut tar, "tmp-of-layer/", EntryType::Directory, b"", "");
        entry(&mut tar, "abs/inside", EntryType::Regular, b"x", "");
        let (dir, result) = unpacked(&tar.into_inner().unwrap());
        result.unwrap();
        assert!(!dir.path().join("escaped").exists());
        assert!(dir.path().join("layer/escaped").exists(), "the layer's root is where '..' ends");
        assert!(dir.path().join("layer/tmp-of-layer/inside").exists());
    }

    #[test]
    fn a_directory_over_a_link_replaces_the_link_and_spares_its_target() {
        use std::os::unix::fs::PermissionsExt;
        let outside = tempfile::tempdir().unwrap();
        let victim = outside.path().join("v");
        std::fs::write(&victim, "").unwrap();
        std::fs::set_permissions(&victim, PermissionsExt::from_mode(0o600)).unwrap();
        let mut tar = tar::Builder::new(Vec::new());
        entry(&mut tar, "d", EntryType::Symlink, b"", victim.to_str().unwrap());
        entry(&mut tar, "d/", EntryType::Directory, b"", "");
        let (dir, result) = unpacked(&tar.into_inner().unwrap());
        result.unwrap();
        assert_eq!(std::fs::metadata(&victim).unwrap().permissions().mode() & 0o7777, 0o600);
        assert!(std::fs::symlink_metadata(dir.path().join("layer/d")).unwrap().is_dir());
    }

    #[test]
    fn a_whiteout_of_the_parent_directory_is_refused_and_removes_nothing() {
        for name in [".wh.", ".wh..", ".wh..."] {
            let mut tar = tar::Builder::new(Vec::new());
            entry(&mut tar, "kept", EntryType::Regular, b"x", "");
            entry(&mut tar, name, EntryType::Regular, b"", "");
            let (dir, result) = unpacked(&tar.into_inner().unwrap());
            let expected = format!("{name}: the whiteout names no entry of its directory");
            assert_eq!(chain(&result.unwrap_err()), expected);
            assert!(dir.path().join("layer/kept").exists());
        }
    }

    #[test]
    fn an_entry_that_climbs_is_refused() {
        let mut tar = tar::Builder::new(Vec::new());
        entry(&mut tar, "a/../../b", EntryType::Regular, b"x", "");
        let (_dir, result) = unpacked(&tar.into_inner().unwrap());
        assert_eq!(chain(&result.unwrap_err()), "a/../../b: the path leads out of the layer");
    }

    #[test]
    fn a_changed_byte_is_a_wrong_digest() {
        let mut tar = tar::Builder::new(Vec::new());
        entry(&mut tar, "file", EntryType::Regular, b"content", "");
        let mut layer = tar.into_inner().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let job = job(&layer, dir.path(), ImageLimits::default());
        let digest = job.digest.clone();
        layer[600] ^= 1;
        let err = unpack(&layer[..], &job).unwrap_err();
        assert_eq!(chain(&err), format!("blob {digest} has digest {}", sum(&layer)));
    }

    /// Each layer alone is within the limit.
    #[test]
    fn bytes_behind_the_end_of_the_tar_count_for_the_layers_above() {
        let mut tar = tar::Builder::new(Vec::new());
        entry(&mut tar, "file", EntryType::Regular, b"x", "");
        let mut layer = tar.into_inner().unwrap();
        layer.resize(60_000, 0);
        let limits = ImageLimits { unpacked_bytes: 100_000, ..ImageLimits::default() };
        let below = tempfile::tempdir().unwrap();
        let used = unpack(&layer[..], &job(&layer, below.path(), limits.clone())).unwrap();
        assert_eq!(used, Used { unpacked_bytes: 60_000, entries: 1 });
        let above = tempfile::tempdir().unwrap();
        let job = Job { used, ..job(&layer, above.path(), limits) };
        let error = unpack(&layer[..], &job).unwrap_err();
        assert_eq!(chain(&error), "the image unpacks to more than 100000 bytes (--image-max-unpacked-bytes)");
    }

    #[test]
    fn links_do_not_lead_deeper_than_the_limit() {
        let mut tar = tar::Builder::new(Vec::new());
        entry(&mut tar, "a/a/a/a", EntryType::Directory, b"", "");
        entry(&mut tar, "l", EntryType::Symlink, b"", "a/a/a/a");
        entry(&mut tar, "l/a/a", EntryType::Directory, b"", "");
        let layer = tar.into_inner().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let limits = ImageLimits { depth: 5, ..ImageLimits::default() };
        let error = unpack(&layer[..], &job(&layer, dir.path(), limits)).unwrap_err();
        assert_eq!(chain(&error), "l/a/a: more than 5 directories inside one another (--image-max-depth)");
    }
}
