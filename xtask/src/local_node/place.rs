//! The node's directory: what is where in it, and its lock.
//!
//! Invariant: `down` removes all that is in the directory, so `up` takes only one that it makes or that is
//! empty, that has the owner who runs it, and that no one else can write.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, ensure};
use linux::lock::FileLock;
use nix::fcntl::OFlag;
use nix::unistd::geteuid;

/// The path of a unix socket has 107 bytes at most, and the longest one below the directory takes 65.
const MAX_DIRECTORY_BYTES: usize = 40;
const RECORD: &str = "up.json";
/// How the names of its unfinished versions begin ([`linux::atomic_file`]).
const UNFINISHED_RECORD: &str = ".up.json.";
/// Permission bits that let the group or others write.
const WRITE_OF_OTHERS: u32 = 0o022;

/// Of `up` and `down` without `--dir`.
pub(super) const DEFAULT_DIR: &str = "/var/lib/hawser-up";

/// The node's directory.
#[derive(Debug)]
pub(super) struct Place(PathBuf);

impl Place {
    /// The directory need not exist.
    pub(super) fn new(dir: &Path) -> Result<Self> {
        let shown = dir.display();
        let (parent, name) = (dir.parent(), dir.file_name());
        let named = parent.zip(name).filter(|_| dir.is_absolute());
        let (parent, name) = named.with_context(|| format!("--dir {shown}: an absolute path is needed"))?;
        let has_dots = dir.components().any(|part| part == Component::ParentDir);
        ensure!(!has_dots, "--dir {shown}: a path without .. is needed");
        // One name for one directory: mounts and programs are found by their real paths.
        let dir = &match fs::canonicalize(parent) {
            Err(e) if e.kind() == ErrorKind::NotFound => dir.to_owned(),
            real => real.with_context(|| format!("--dir {shown}: {}", parent.display()))?.join(name),
        };
        let bytes = dir.as_os_str().as_encoded_bytes();
        ensure!(
            bytes.len() <= MAX_DIRECTORY_BYTES,
            "--dir {shown}: longer than {MAX_DIRECTORY_BYTES} bytes, so paths of sockets below it would not fit"
        );
        // It stands in commands that are to be pasted into a shell.
        let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"/._-".contains(byte);
        ensure!(
            bytes.iter().all(is_plain),
            "--dir {shown}: only letters, digits and the characters / . _ - are allowed"
        );
        let place = Self(dir.to_owned());
        match fs::symlink_metadata(dir) {
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            found => place.require_ours(&found.with_context(|| dir.display().to_string())?)?,
        }
        Ok(place)
    }

    /// An error for a symbolic link, a file, or a directory that others own or can write.
    fn require_ours(&self, found: &fs::Metadata) -> Result<()> {
        let (shown, user, mode) = (self.0.display(), geteuid(), found.mode() & 0o7777);
        ensure!(found.is_dir(), "--dir {shown}: it is there, and no directory");
        ensure!(
            found.uid() == user.as_raw() && mode & WRITE_OF_OTHERS == 0,
            "--dir {shown}: mode {mode:04o}, owner {}: a directory is needed that user {user} owns and no one \
             else can write",
            found.uid()
        );
        Ok(())
    }

    pub(super) fn dir(&self) -> &Path {
        &self.0
    }

    /// What `up` and `down` need to find the node.
    pub(super) fn directory_flag(&self) -> String {
        if self.0 == Path::new(DEFAULT_DIR) { String::new() } else { format!(" --dir {}", self.0.display()) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Programs and CNI plugins. Each process of the node outside its containers runs one of them.
    pub(super) fn programs(&self) -> PathBuf {
        self.path("bin")
    }

    pub(super) fn program(&self, name: &str) -> PathBuf {
        self.programs().join(name)
    }

    /// The script that calls `hawser-kubelet` for this node.
    pub(super) fn command(&self) -> PathBuf {
        self.path("hawser")
    }

    /// The script that calls `hawser-csi` for this node.
    pub(super) fn driver_command(&self) -> PathBuf {
        self.path("hawser-csi")
    }

    /// The kubelet's `--root-dir`.
    pub(super) fn kubelet(&self) -> PathBuf {
        self.path("k")
    }

    pub(super) fn manifests(&self) -> PathBuf {
        self.path("m")
    }

    pub(super) fn images(&self) -> PathBuf {
        self.path("images")
    }

    /// The directory of the network's configuration.
    pub(super) fn network(&self) -> PathBuf {
        self.path("net")
    }

    pub(super) fn leases(&self) -> PathBuf {
        self.path("leases")
    }

    /// The driver's directory for volumes.
    pub(super) fn pool(&self) -> PathBuf {
        self.path("pool")
    }

    /// The driver's `--state-dir`.
    pub(super) fn state(&self) -> PathBuf {
        self.path("state")
    }

    /// The driver's `--run-dir`.
    pub(super) fn run(&self) -> PathBuf {
        self.path("run")
    }

    /// Logs of the pods.
    pub(super) fn pod_logs(&self) -> PathBuf {
        self.path("pods")
    }

    /// The log of one of the node's daemons.
    pub(super) fn log_of(&self, daemon: &str) -> PathBuf {
        self.path(&format!("{daemon}.log"))
    }

    /// Manifests to try.
    pub(super) fn examples(&self) -> PathBuf {
        self.path("examples")
    }

    /// Whether `up` has begun to make a node in `dir`.
    pub(super) fn is_recorded(dir: &Path) -> bool {
        dir.join(RECORD).is_file()
    }

    pub(super) fn record(&self) -> PathBuf {
        self.path(RECORD)
    }

    /// Creates the directory if it is missing, and locks it against another `up` or `down`. An error if it
    /// has no record, and anything else.
    pub(super) fn lock_or_create(&self) -> Result<FileLock> {
        loop {
            let made = DirBuilder::new().mode(0o700).create(&self.0);
            match made {
                Err(e) if e.kind() != ErrorKind::AlreadyExists => {
                    return Err(e).with_context(|| format!("create {}", self.0.display()));
                }
                _ => {}
            }
            if let Some(lock) = self.lock()? {
                self.require_unused_or_recorded()?;
                return Ok(lock);
            }
        }
    }

    /// `None` if there is no such directory.
    pub(super) fn lock(&self) -> Result<Option<FileLock>> {
        let shown = || self.0.display().to_string();
        let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW;
        let dir = match File::options().read(true).custom_flags(flags.bits()).open(&self.0) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            opened => opened.with_context(shown)?,
        };
        let opened = dir.metadata().with_context(shown)?;
        self.require_ours(&opened)?;
        let lock = FileLock::try_of(dir).with_context(shown)?;
        let lock = lock.with_context(|| {
            format!("another cargo xtask up or down is at work on {}: wait for its end", self.0.display())
        })?;
        // A `down` may have removed the directory before it was locked here.
        let is_same = |now: fs::Metadata| (now.dev(), now.ino()) == (opened.dev(), opened.ino());
        let is_same = fs::symlink_metadata(&self.0).is_ok_and(is_same);
        Ok(is_same.then_some(lock))
    }

    fn require_unused_or_recorded(&self) -> Result<()> {
        if fs::symlink_metadata(self.record()).is_ok() {
            return Ok(());
        }
        for entry in fs::read_dir(&self.0).with_context(|| self.0.display().to_string())? {
            let name = entry.with_context(|| self.0.display().to_string())?.file_name();
            ensure!(
                is_unfinished_record(&name),
                "--dir {}: it holds {}, and no up.json, so cargo xtask up did not make it: name a directory that \
                 is empty or not there",
                self.0.display(),
                name.display()
            );
        }
        Ok(())
    }

    /// Removes the directory. The record goes last: without it, nothing else is left.
    pub(super) fn remove(&self) -> Result<()> {
        for entry in fs::read_dir(&self.0).with_context(|| self.0.display().to_string())? {
            let path = entry.with_context(|| self.0.display().to_string())?.path();
            if path != self.record() {
                remove_any(&path)?;
            }
        }
        remove_any(&self.record())?;
        fs::remove_dir(&self.0).with_context(|| format!("remove {}", self.0.display()))
    }

    /// [`Self::remove_unused`] for a directory whose record stands for no change yet.
    pub(super) fn remove_unclaimed(&self) -> Result<()> {
        remove_any(&self.record())?;
        self.remove_unused()
    }

    /// Removes the directory of an `up` that was interrupted before it changed anything. An error if
    /// the directory holds anything but a record that was not finished.
    pub(super) fn remove_unused(&self) -> Result<()> {
        for entry in fs::read_dir(&self.0).with_context(|| self.0.display().to_string())? {
            let entry = entry.with_context(|| self.0.display().to_string())?;
            if is_unfinished_record(&entry.file_name()) {
                remove_any(&entry.path())?;
            }
        }
        fs::remove_dir(&self.0).with_context(|| {
            format!(
                "{} has no up.json, so cargo xtask up did not make it: remove it by hand",
                self.0.display()
            )
        })
    }
}

fn is_unfinished_record(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(UNFINISHED_RECORD.as_bytes())
}

fn remove_any(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        found if found.as_ref().is_ok_and(fs::Metadata::is_dir) => Ok(linux::tree::remove(path)?),
        _ => fs::remove_file(path).with_context(|| format!("remove {}", path.display())),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_directory_that_a_shell_or_a_socket_cannot_take_is_refused() {
        let refused = |dir: &str| Place::new(Path::new(dir)).unwrap_err().to_string();
        assert!(refused("up").contains("an absolute path"));
        assert!(refused("/").contains("an absolute path"));
        assert!(refused("/tmp/../root").contains("without .."));
        assert!(refused("/tmp/a b").contains("only letters"));
        assert!(refused("/tmp/$(id)").contains("only letters"));
        assert!(refused(&format!("/{}", "a".repeat(40))).contains("longer than 40 bytes"));
        Place::new(Path::new("/var/lib/hawser-up")).unwrap();
    }

    #[test]
    fn a_directory_of_others_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("d");
        fs::create_dir(&at).unwrap();
        let refused =
            || format!("{:#}", Place::new(&at).and_then(|place| place.lock_or_create()).unwrap_err());
        fs::set_permissions(&at, Permissions::from_mode(0o777)).unwrap();
        assert!(refused().contains("mode 0777"), "{}", refused());
        fs::set_permissions(&at, Permissions::from_mode(0o755)).unwrap();
        fs::write(at.join("letter"), "of another program").unwrap();
        assert!(refused().contains("it holds letter, and no up.json"), "{}", refused());
        fs::write(at.join(RECORD), "{}").unwrap();
        Place::new(&at).unwrap().lock_or_create().unwrap();
        fs::remove_dir_all(&at).unwrap();
        // It leads nowhere.
        symlink(dir.path().join("missing"), &at).unwrap();
        assert!(refused().contains("no directory"), "{}", refused());
        Place(at).lock_or_create().unwrap_err();
    }

    #[test]
    fn a_directory_has_its_real_name() {
        let dir = tempfile::tempdir().unwrap();
        let real = fs::canonicalize(dir.path()).unwrap();
        symlink(&real, real.join("l")).unwrap();
        assert_eq!(Place::new(&real.join("l/up")).unwrap().dir(), real.join("up"));
    }

    #[test]
    fn a_directory_with_other_files_and_no_record_stays() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place(dir.path().join("up"));
        drop(place.lock_or_create().unwrap());
        fs::write(place.path(".up.json.17.tmp"), "{").unwrap();
        fs::write(place.path("letter"), "of another program").unwrap();
        assert!(format!("{:#}", place.remove_unused().unwrap_err()).contains("did not make it"));
        assert!(place.path("letter").exists());
        fs::remove_file(place.path("letter")).unwrap();
        place.remove_unused().unwrap();
        assert!(place.lock().unwrap().is_none());
    }
}
