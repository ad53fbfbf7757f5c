//! Staging and target paths, which the caller chooses.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use linux::mountinfo::{self, MountEntry};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, StatxFlags};
use rustix::io::Errno;

use crate::config::{AllowedPaths, Config};
use crate::error::{Error, Result, Step};
use crate::kernel::bounded::InTurn;
use crate::kernel::place::Place;
use crate::model::limits;

/// PATH_MAX without its terminating zero, and NAME_MAX.
const MAX_BYTES: usize = 4095;
const MAX_NAME_BYTES: usize = 255;
/// The kernel's limit on symbolic links (path_resolution(7)).
const MAX_LINKS: u32 = 40;

/// An absolute path without `..` and zero bytes. Its symbolic links are not resolved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostPath {
    field: &'static str,
    path: PathBuf,
}

impl HostPath {
    /// `field` is its name in messages.
    pub(crate) fn parse(field: &'static str, text: &str) -> Result<Self> {
        if text.is_empty() {
            return Err(Error::MissingField { field });
        }
        let path = Path::new(text);
        let reason = if !path.is_absolute() {
            "not an absolute path"
        } else if text.len() > MAX_BYTES || text.contains('\0') {
            "longer than 4095 bytes or with a zero byte"
        } else if path.components().any(|c| c.as_os_str().len() > MAX_NAME_BYTES) {
            "a name in it is longer than 255 bytes"
        } else if path.components().any(|c| c == Component::ParentDir) || path.file_name().is_none() {
            "`..` or no name at its end"
        } else {
            return Ok(Self { field, path: path.components().collect() });
        };
        Err(Error::invalid(field, text, reason))
    }

    /// The caller's text, without `//`, `/./` and a trailing `/`.
    pub(crate) fn as_asked(&self) -> &Path {
        &self.path
    }
}

/// The allowed staging and target paths: outside the driver's own directories, not through a FUSE
/// mount and, with `--paths kubelet-dir`, below the kubelet's directory.
#[derive(Debug)]
pub(crate) struct HostPaths {
    kubelet_dir: PathBuf,
    allowed: AllowedPaths,
    own_dirs: Vec<PathBuf>,
    /// One at a time for each mount that a path leads through: a hanging file system costs one
    /// thread.
    looks: InTurn<PathBuf>,
}

impl HostPaths {
    pub(crate) fn new(config: &Config) -> Result<Self> {
        let csi_socket = config.csi_socket();
        let csi_dir = csi_socket.parent().unwrap_or(&config.kubelet_dir);
        let own_dirs = [config.pool.as_path(), &config.state_dir, &config.run_dir, csi_dir];
        let kubelet_dir =
            follow(&config.kubelet_dir, None).map_err(|e| e.at("--kubelet-dir", &config.kubelet_dir))?;
        let own_dirs = own_dirs.into_iter().map(|dir| follow(dir, None).unwrap_or_else(|_| dir.to_owned()));
        let own_dirs = own_dirs.filter(|dir| !kubelet_dir.starts_with(dir)).collect();
        Ok(Self { kubelet_dir, allowed: config.paths, own_dirs, looks: InTurn::default() })
    }

    /// Returns the path as mountinfo shows it: links in its existing parents are resolved. The last
    /// component is never accessed: it may be the root of a FUSE mount whose daemon does not
    /// answer. A path that `is_known`, for example from an earlier `--kubelet-dir`, may be
    /// anywhere.
    pub(crate) fn resolve(&self, path: &HostPath, is_known: impl Fn(&Path) -> bool) -> Result<PathBuf> {
        if is_known(&path.path) {
            return Ok(path.path.clone());
        }
        self.resolve_anew(path, is_known)
    }

    /// [`Self::resolve`] for calls that mount: links in the parents are resolved also for a known
    /// path.
    pub(crate) fn resolve_anew(&self, path: &HostPath, is_known: impl Fn(&Path) -> bool) -> Result<PathBuf> {
        let resolved = self.follow(path)?;
        if is_known(&resolved) {
            return Ok(resolved);
        }
        let is_below = resolved.starts_with(&self.kubelet_dir) && resolved != self.kubelet_dir;
        if !is_below && self.allowed == AllowedPaths::KubeletDir {
            let reason = format!("not below {}, as --paths kubelet-dir wants it", self.kubelet_dir.display());
            return Err(refusal(path, reason));
        }
        if let Some(own) = self.own_dirs.iter().find(|own| resolved.starts_with(own)) {
            return Err(refusal(path, format!("in the driver's own directory {}", own.display())));
        }
        Ok(resolved)
    }

    /// [`Self::resolve`] for calls that create nothing: `None` for a path where the driver stages
    /// and publishes no volume.
    pub(crate) fn find(&self, path: &HostPath, is_known: impl Fn(&Path) -> bool) -> Result<Option<PathBuf>> {
        match self.resolve(path, is_known) {
            Ok(resolved) => Ok(Some(resolved)),
            Err(Error::InvalidField { .. }) => Ok(None),
            Err(other) => Err(other),
        }
    }

    /// Opens the place at `path`, which is from [`Self::resolve`] or the journal. A link in its
    /// parents or a FUSE mount must have come later: [`Error::PathChanged`]. `None` if its parent
    /// is not a directory.
    ///
    /// `path` was allowed as text. Without links, the walk cannot leave that path.
    pub(crate) fn place(&self, field: &'static str, path: &Path) -> Result<Option<Place>> {
        let (parent, name) = split(field, path)?;
        match self.walk(field, path, parent, Links::Refuse)? {
            Ok(Walked { dir: Some(dir), .. }) => {
                Place::new(field, dir, name, path.to_owned()).map(Some).step("look at mount point")
            }
            Ok(Walked { dir: None, .. }) | Err(WalkError::Io(Errno::NOTDIR)) => Ok(None),
            Err(WalkError::Fuse(mount)) => Err(Error::changed(field, path, leads_through(&mount))),
            Err(e) => Err(e.at(field, path)),
        }
    }

    fn follow(&self, path: &HostPath) -> Result<PathBuf> {
        let HostPath { field, path: asked } = path;
        let (parent, name) = split(field, asked)?;
        let followed = self.walk(field, asked, parent, Links::Follow)?;
        utf8(field, followed.map_err(|e| e.at(field, asked))?.path.join(name))
    }

    /// Walks to the `parent` of `path`, with one system call if possible.
    fn walk(
        &self,
        field: &'static str,
        path: &Path,
        parent: PathBuf,
        links: Links,
    ) -> Result<std::result::Result<Walked, WalkError>> {
        let what = || format!("look at {field} {}", path.display());
        let kubelet_dir = self.kubelet_dir.clone();
        if parent.starts_with(&kubelet_dir) {
            let (start, way) = (kubelet_dir.clone(), parent.clone());
            let look = move || open_straight(&start, &way);
            if let Some(dir) = self.looks.within(&kubelet_dir, what(), limits::PATH_LOOK, look)? {
                return Ok(Ok(Walked { path: parent, dir: Some(dir) }));
            }
        }
        let key = mountinfo::point_above(&parent).step("read mountinfo")?;
        let look = move || walk(&parent, Some(&kubelet_dir), links);
        self.looks.within(&key, what(), limits::PATH_LOOK, look)
    }
}

/// Opens the directory at `path`, if neither a link nor a mount lies between `start` and it.
fn open_straight(start: &Path, path: &Path) -> Option<OwnedFd> {
    let below = path.strip_prefix(start).ok()?;
    let below = if below.as_os_str().is_empty() { Path::new(".") } else { below };
    let no_links = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let start = open_dir_path(CWD, start, no_links)?;
    open_dir_path(&start, below, no_links | ResolveFlags::BENEATH | ResolveFlags::NO_XDEV)
}

fn open_dir_path(dir: impl AsFd, path: &Path, resolve: ResolveFlags) -> Option<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat2(dir, path, flags, Mode::empty(), resolve).ok()
}

fn split(field: &'static str, path: &Path) -> Result<(PathBuf, OsString)> {
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => Ok((parent.to_owned(), name.to_owned())),
        _ => Err(Error::invalid(field, path.to_string_lossy(), "no name at its end")),
    }
}

fn refusal(path: &HostPath, reason: impl Into<String>) -> Error {
    Error::invalid(path.field, path.path.to_string_lossy(), reason)
}

#[derive(Debug)]
enum WalkError {
    Io(Errno),
    Links,
    /// A link where none may be followed.
    Link(PathBuf),
    Fuse(Box<MountEntry>),
    Mountinfo(linux::Error),
}

impl WalkError {
    fn at(self, field: &'static str, path: &Path) -> Error {
        match self {
            Self::Io(e @ (Errno::NOTDIR | Errno::ACCESS | Errno::LOOP | Errno::NAMETOOLONG)) => {
                Error::unusable(field, path, std::io::Error::from(e).to_string())
            }
            // An I/O error, not a fault of the path.
            Self::Io(e) => {
                Error::Kernel { step: "follow path", source: linux::Error::at("look at", path, e) }
            }
            Self::Links => Error::unusable(field, path, format!("leads through more than {MAX_LINKS} links")),
            Self::Link(at) => Error::changed(field, path, format!("{} has become a link", at.display())),
            Self::Fuse(mount) => Error::invalid(field, path.to_string_lossy(), leads_through(&mount)),
            Self::Mountinfo(source) => Error::Kernel { step: "read mountinfo", source },
        }
    }
}

fn leads_through(mount: &MountEntry) -> String {
    let (at, kind, source) = (mount.mount_point.display(), &mount.fs_type, mount.source.display());
    format!("leads through {at}, a mount of {kind} from {source}")
}

impl From<Errno> for WalkError {
    fn from(errno: Errno) -> Self {
        Self::Io(errno)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Links {
    Follow,
    Refuse,
}

struct Walked {
    path: PathBuf,
    /// `None` if the path does not exist or is not a directory.
    dir: Option<OwnedFd>,
}

/// The path with its links resolved, as far as it exists.
fn follow(path: &Path, kubelet_dir: Option<&Path>) -> std::result::Result<PathBuf, WalkError> {
    walk(path, kubelet_dir, Links::Follow).map(|walked| walked.path)
}

/// Walks `path` as far as it exists, where [`open_straight`] cannot. Each step opens one name and
/// checks its type. The walk never enters a FUSE mount, so no daemon is asked for a name. FUSE
/// mounts that contain `kubelet_dir` itself belong to the node and are allowed; without it, none
/// is.
fn walk(path: &Path, kubelet_dir: Option<&Path>, follow: Links) -> std::result::Result<Walked, WalkError> {
    let root = || open(CWD, OsStr::new("/"));
    let mut names: Vec<OsString> = names_in(path);
    let (mut dir, mut resolved, mut links) = (root()?, PathBuf::from("/"), 0);
    let Found { mut device, mut kind } = stat(&dir)?;
    while let Some(name) = names.pop() {
        let step = match open(&dir, &name) {
            Ok(step) => step,
            Err(Errno::NOENT) => {
                names.push(name);
                names.into_iter().rev().for_each(|name| append(&mut resolved, &name));
                return Ok(Walked { path: resolved, dir: None });
            }
            Err(e) => return Err(e.into()),
        };
        let found = stat(&step)?;
        if found.device != device
            && let Some(kubelet_dir) = kubelet_dir
            && let Some(mount) = fuse_mount(found.device, kubelet_dir)?
        {
            return Err(WalkError::Fuse(Box::new(mount)));
        }
        if found.kind == FileType::Symlink {
            if follow == Links::Refuse {
                return Err(WalkError::Link(resolved.join(name)));
            }
            links += 1;
            if links > MAX_LINKS {
                return Err(WalkError::Links);
            }
            let target = rustix::fs::readlinkat(&step, "", Vec::new())?;
            let target = Path::new(OsStr::from_bytes(target.as_bytes()));
            names.extend(names_in(target));
            if target.is_absolute() {
                (dir, resolved) = (root()?, PathBuf::from("/"));
                (device, kind) = (stat(&dir)?.device, FileType::Directory);
            }
            continue;
        }
        append(&mut resolved, &name);
        (dir, device, kind) = (step, found.device, found.kind);
    }
    Ok(Walked { path: resolved, dir: (kind == FileType::Directory).then_some(dir) })
}

/// In reverse order, without `.`.
fn names_in(path: &Path) -> Vec<OsString> {
    let is_step =
        |component: &Component<'_>| matches!(component, Component::Normal(_) | Component::ParentDir);
    path.components().rev().filter(is_step).map(|component| component.as_os_str().to_owned()).collect()
}

fn append(path: &mut PathBuf, name: &OsStr) {
    if name == ".." {
        path.pop();
    } else {
        path.push(name);
    }
}

fn open(dir: impl AsFd, name: &OsStr) -> std::result::Result<OwnedFd, Errno> {
    rustix::fs::openat(dir, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

struct Found {
    device: (u32, u32),
    kind: FileType,
}

/// From the kernel's memory: no file system is asked.
fn stat(fd: &OwnedFd) -> std::result::Result<Found, Errno> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let found = rustix::fs::statx(fd, "", flags, StatxFlags::TYPE)?;
    let kind = FileType::from_raw_mode(found.stx_mode.into());
    Ok(Found { device: (found.stx_dev_major, found.stx_dev_minor), kind })
}

fn fuse_mount(device: (u32, u32), kubelet_dir: &Path) -> std::result::Result<Option<MountEntry>, WalkError> {
    let is_it = |mount: &MountEntry| {
        (mount.major, mount.minor) == device
            && mount.fs_type.starts_with("fuse")
            && !kubelet_dir.starts_with(&mount.mount_point)
    };
    Ok(mountinfo::read().map_err(WalkError::Mountinfo)?.into_iter().find(is_it))
}

/// The journal is JSON, so its paths must be UTF-8.
fn utf8(field: &'static str, path: PathBuf) -> Result<PathBuf> {
    match path.to_str() {
        Some(_) => Ok(path),
        None => Err(Error::unusable(field, &path, "leads through a name that is not UTF-8")),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_in_the_parents_are_followed_and_the_last_component_is_not() {
        let (dir, paths) = paths("real");
        let real = paths.kubelet_dir.clone();
        symlink(&real, dir.path().join("link")).unwrap();
        symlink("/etc", real.join("last")).unwrap();
        symlink("../real/./x/../y", real.join("relative")).unwrap();
        for (below, resolved) in
            [("link/last", "last"), ("link/a/b", "a/b"), ("real/x/", "x"), ("real/relative/z", "y/z")]
        {
            assert_eq!(paths.resolve(&at(&dir, below), |_| false).unwrap(), real.join(resolved), "{below}");
        }
        std::fs::write(real.join("file"), "").unwrap();
        symlink("loop", real.join("loop")).unwrap();
        for (below, reason) in [("real/file/x/y", "Not a directory"), ("real/loop/x", "more than 40 links")] {
            let error = paths.resolve(&at(&dir, below), |_| false).unwrap_err();
            assert!(matches!(error, Error::UnusablePath { .. }), "{error}");
            assert!(error.to_string().contains(reason), "{error}");
        }
    }

    #[test]
    fn only_paths_below_the_kubelets_directory_are_taken_however_it_is_named() {
        for kubelet_dir in ["real", "link-to-real"] {
            let (dir, paths) = paths(kubelet_dir);
            let real = dir.path().canonicalize().unwrap().join("real");
            assert_eq!(paths.kubelet_dir, real);
            symlink("/etc", real.join("out")).unwrap();
            symlink("..", real.join("up")).unwrap();
            for taken in ["real/a/b", "link-to-real/a/b", "real/up/real/a"] {
                assert!(paths.resolve(&at(&dir, taken), |_| false).unwrap().starts_with(&real), "{taken}");
            }
            let any = HostPaths { allowed: AllowedPaths::Any, ..self::paths(kubelet_dir).1 };
            assert_eq!(
                any.resolve(&at(&dir, "real-not/a"), |_| false).unwrap(),
                real.with_file_name("real-not/a")
            );
            for (refused, reason) in [
                ("real", "not below"),
                ("link-to-real", "not below"),
                ("real-not/a", "not below"),
                ("real/out/zz", "not below"),
                ("real/up/a", "not below"),
                ("real/pool", "own directory"),
                ("real/pool/trash/a", "own directory"),
                ("real/plugins/csi.hawser.dev/a", "own directory"),
                ("state/a", "not below"),
            ] {
                let path = at(&dir, refused);
                let error = paths.resolve(&path, |_| false).unwrap_err();
                assert!(matches!(error, Error::InvalidField { .. }), "{error}");
                let message = error.to_string();
                assert!(message.contains(reason) && message.contains("target_path"), "{message}");
                assert!(message.contains(refused), "{message}");
                assert_eq!(paths.find(&path, |_| false).unwrap(), None);
                let known = paths.resolve(&path, |_| true).unwrap();
                assert_eq!(known, path.as_asked(), "known paths stay usable");
            }
        }
    }

    #[test]
    fn a_place_is_reached_through_directories_alone() {
        let (_dir, paths) = paths("real");
        let real = paths.kubelet_dir.clone();
        std::fs::create_dir_all(real.join("a/b")).unwrap();
        std::fs::write(real.join("file"), "").unwrap();
        symlink("a", real.join("link")).unwrap();
        let place = |below: &str| paths.place("target_path", &real.join(below));
        assert_eq!(place("a/b/new").unwrap().unwrap().path(), real.join("a/b/new"));
        for missing in ["a/no/new", "file/new", "a/no/such/new"] {
            assert!(place(missing).unwrap().is_none(), "{missing}");
        }
        for changed in ["link/new", "link/b/new"] {
            let error = place(changed).unwrap_err();
            assert!(matches!(error, Error::PathChanged { .. }), "{error}");
            assert!(error.to_string().contains("link has become a link"), "{error}");
        }
    }

    fn at(dir: &tempfile::TempDir, below: &str) -> HostPath {
        HostPath::parse("target_path", dir.path().join(below).to_str().unwrap()).unwrap()
    }

    /// A kubelet's directory `real` with a pool in it, given by that name or by a link to it.
    fn paths(kubelet_dir: &str) -> (tempfile::TempDir, HostPaths) {
        use clap::Parser;
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("real/pool")).unwrap();
        symlink("real", dir.path().join("link-to-real")).unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        let flags = crate::config::Flags::parse_from([
            "hawser-csi",
            "--node-id=n",
            "--launcher=process",
            "--volume-binary=/v",
            "--paths=kubelet-dir",
            &format!("--kubelet-dir={}", path(kubelet_dir)),
            &format!("--pool={}", path("real/pool")),
            &format!("--state-dir={}", path("state")),
            &format!("--run-dir={}", "/run/hawser"),
        ]);
        let paths = HostPaths::new(&Config::check(flags).unwrap()).unwrap();
        (dir, paths)
    }

    #[test]
    fn relative_and_climbing_paths_are_refused() {
        let long = format!("/a/{}/b", "n".repeat(256));
        for text in ["some/path", "/a/../b", "/", "/a\0b", &long] {
            assert!(
                matches!(HostPath::parse("target_path", text), Err(Error::InvalidField { .. })),
                "{text:?}"
            );
        }
        assert!(matches!(HostPath::parse("target_path", ""), Err(Error::MissingField { .. })));
    }
}
