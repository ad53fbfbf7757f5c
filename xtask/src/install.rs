//! `install`: our plugins in a node's plugin directory in place of others', and
//! back again.
//!
//! Beside a plugin that was there before stays `<plugin>.before-hawser`, which
//! is the same file (a second name of its inode, so content, mode, owner and
//! times are what they were); where none was there, the empty file
//! `<plugin>.none-before-hawser` says so. Runtimes look for a file named like
//! the plugin's type and take no notice of either. `.hawser-installed` lists the
//! checksums of what was installed, as sha256sum prints them.
//!
//! Invariant: in every moment, each plugin that was there is there, whole, under
//! its name; after a kill or a power cut both directions can be run again.

use std::fs::{self, File, Permissions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ::tests::binaries;
use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};
use xtask::build::plugins;
use xtask::progress::{part, say};

const RECORD: &str = ".hawser-installed";

pub(crate) fn run(cni_bin_dir: &Path, put_back: bool) -> Result<()> {
    if put_back {
        return Directory::open(cni_bin_dir)?.put_back_all();
    }
    let from = part("build the static plugins", plugins)?;
    fs::create_dir_all(cni_bin_dir).with_context(|| cni_bin_dir.display().to_string())?;
    Directory::open(cni_bin_dir)?.install_all(&from)
}

/// The plugin directory, locked against another of these programs.
struct Directory {
    path: PathBuf,
    handle: File,
}

/// What has the plugin's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Present {
    Nothing,
    /// What the record says that we installed.
    Ours,
    /// The very file that is kept.
    Kept,
    /// A foreign file, or ours if the record was lost.
    Other,
}

/// What is remembered of the time before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Before {
    /// Nothing is remembered: we were not here, or the memory was removed.
    Unknown,
    /// There was no such plugin.
    Nothing,
    /// It is kept.
    File,
}

/// What install does before it replaces the plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Remember {
    Nothing,
    ThePresentOne,
    Already,
    /// Neither ours nor kept: a newer foreign one.
    Stop,
}

/// What put-back does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Restore {
    TheKeptOne,
    /// The plugin has it already.
    OnlyForget,
    RemoveOurs,
    Leave,
}

/// How put-back leaves a plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Settled,
    /// Another program has replaced ours, and the one from before is still kept.
    StillKept,
    StillOurs,
}

fn before_install(present: Present, before: Before) -> Remember {
    match (before, present) {
        (Before::Unknown, Present::Nothing) => Remember::Nothing,
        (Before::Unknown | Before::Nothing, Present::Other | Present::Kept) => Remember::ThePresentOne,
        (Before::Unknown | Before::Nothing | Before::File, Present::Ours)
        | (Before::Nothing, Present::Nothing)
        | (Before::File, Present::Nothing | Present::Kept) => Remember::Already,
        (Before::File, Present::Other) => Remember::Stop,
    }
}

/// `recorded`: there is a checksum of what we installed.
fn to_put_back(present: Present, before: Before, recorded: bool) -> Restore {
    match (before, present) {
        (Before::File, Present::Kept) | (Before::Nothing, Present::Nothing) => Restore::OnlyForget,
        (Before::File, Present::Nothing | Present::Ours) => Restore::TheKeptOne,
        (Before::Nothing, Present::Ours) => Restore::RemoveOurs,
        // Without a record it may be ours.
        (Before::File, Present::Other) if !recorded => Restore::TheKeptOne,
        (Before::Nothing, Present::Other | Present::Kept) if !recorded => Restore::RemoveOurs,
        (Before::File | Before::Nothing, Present::Other | Present::Kept) | (Before::Unknown, _) => {
            Restore::Leave
        }
    }
}

impl Directory {
    fn open(path: &Path) -> Result<Self> {
        let handle = File::open(path).with_context(|| path.display().to_string())?;
        ensure!(handle.metadata()?.is_dir(), "{}: not a directory", path.display());
        handle.lock().with_context(|| format!("lock {}", path.display()))?;
        Ok(Self { path: path.to_owned(), handle })
    }

    fn install_all(&self, from: &Path) -> Result<()> {
        // All of them are looked at before the first one is touched.
        let mut plans = Vec::new();
        let record = self.read_record()?;
        for (_package, plugin) in binaries::CNI_PLUGINS {
            let remember = before_install(self.present(plugin, &record)?, self.before(plugin)?);
            if remember == Remember::Stop {
                bail!(
                    "{} was replaced after it was installed, and an older one is kept as {kept}. \
                     Remove {kept} to keep the present one instead, or rename it back; then run this again",
                    self.path.join(plugin).display(),
                    kept = kept_name(plugin),
                );
            }
            plans.push((plugin, remember, self.prepare(from, plugin)?));
        }
        let mut record = record;
        for (plugin, _, prepared) in &plans {
            record.push((prepared.checksum.clone(), (*plugin).to_owned()));
        }
        self.write_record(&record)?;
        for (plugin, remember, prepared) in &plans {
            self.install(plugin, *remember, prepared).with_context(|| (*plugin).to_owned())?;
        }
        let installed =
            plans.iter().map(|(plugin, _, prepared)| (prepared.checksum.clone(), (*plugin).to_owned()));
        self.write_record(&installed.collect::<Vec<_>>())?;
        say(&format!(
            "cargo xtask install --cni-bin-dir {} --put-back restores what was there",
            self.path.display()
        ));
        Ok(())
    }

    fn install(&self, plugin: &str, remember: Remember, prepared: &Prepared) -> Result<()> {
        let (target, kept, none) =
            (self.path.join(plugin), self.path.join(kept_name(plugin)), self.path.join(none_name(plugin)));
        let outcome = match remember {
            Remember::ThePresentOne => {
                // Of a symbolic link it is the link that gets a second name.
                fs::hard_link(&target, &kept)
                    .with_context(|| format!("second name {} for {}", kept.display(), target.display()))?;
                remove_if_there(&none)?;
                format!("the one before is kept as {}", kept_name(plugin))
            }
            Remember::Nothing => {
                File::create(&none).with_context(|| none.display().to_string())?;
                "there was none before".to_owned()
            }
            Remember::Already => "the one before was kept earlier".to_owned(),
            Remember::Stop => bail!("{}: not to be replaced", target.display()),
        };
        // What is remembered is on the disk before what it is needed for.
        self.sync()?;
        fs::rename(&prepared.path, &target).with_context(|| target.display().to_string())?;
        self.sync()?;
        say(&format!("{}: installed (CNI {}); {outcome}", target.display(), prepared.newest_version));
        Ok(())
    }

    /// Ours under a name that nothing looks for, on the disk, and seen to run.
    fn prepare(&self, from: &Path, plugin: &str) -> Result<Prepared> {
        let (source, path) = (from.join(plugin), self.path.join(format!(".{plugin}.new")));
        remove_if_there(&path)?;
        fs::copy(&source, &path)
            .with_context(|| format!("copy {} to {}", source.display(), path.display()))?;
        fs::set_permissions(&path, Permissions::from_mode(0o755)).context("chmod 0755")?;
        File::open(&path).and_then(|file| file.sync_all()).with_context(|| path.display().to_string())?;
        let newest_version =
            newest_version(&path).with_context(|| format!("start {} with VERSION", path.display()));
        match newest_version {
            Ok(newest_version) => Ok(Prepared { checksum: checksum(&path)?, path, newest_version }),
            Err(e) => {
                remove_if_there(&path)?;
                Err(e)
            }
        }
    }

    fn put_back_all(&self) -> Result<()> {
        let record = self.read_record()?;
        let (mut left, mut ours) = (Vec::new(), Vec::new());
        for (_package, plugin) in binaries::CNI_PLUGINS {
            match self.put_back(plugin, &record).with_context(|| plugin.to_owned())? {
                Outcome::Settled => {}
                Outcome::StillKept => left.push(plugin),
                Outcome::StillOurs => ours.push(plugin),
            }
            remove_if_there(&self.path.join(format!(".{plugin}.new")))?;
        }
        // What is left keeps its line: the next time knows as much as this time.
        let mut remaining = record;
        remaining.retain(|(_, plugin)| left.iter().chain(&ours).any(|name| name == plugin));
        if remaining.is_empty() {
            remove_if_there(&self.path.join(RECORD))?;
        } else {
            self.write_record(&remaining)?;
        }
        remove_if_there(&self.path.join(format!("{RECORD}.new")))?;
        self.sync()?;
        ensure!(ours.is_empty(), "{}: still ours, and what was there before is not known", ours.join(", "));
        Ok(())
    }

    fn put_back(&self, plugin: &str, record: &[(String, String)]) -> Result<Outcome> {
        let (target, kept, none) =
            (self.path.join(plugin), self.path.join(kept_name(plugin)), self.path.join(none_name(plugin)));
        let (present, before) = (self.present(plugin, record)?, self.before(plugin)?);
        let recorded = record.iter().any(|(_, name)| name == plugin);
        let restore = to_put_back(present, before, recorded);
        let outcome = match restore {
            Restore::TheKeptOne => {
                fs::rename(&kept, &target).with_context(|| target.display().to_string())?;
                "put back".to_owned()
            }
            Restore::OnlyForget if before == Before::File => {
                remove_if_there(&kept)?;
                "was never replaced".to_owned()
            }
            Restore::OnlyForget => "not there, as before".to_owned(),
            Restore::RemoveOurs => {
                remove_if_there(&target)?;
                self.sync()?;
                "removed; there was none before".to_owned()
            }
            Restore::Leave if before == Before::File => format!(
                "left alone: another program has replaced the installed one. The one from before is still kept as \
                 {kept}: remove {kept} to keep the present one, or rename it back",
                kept = kept_name(plugin)
            ),
            Restore::Leave if present == Present::Ours => "left alone: ours, and nothing is kept".to_owned(),
            Restore::Leave if present == Present::Nothing => "not there: nothing to put back".to_owned(),
            Restore::Leave => "left alone: not ours".to_owned(),
        };
        remove_if_there(&none)?;
        self.sync()?;
        say(&format!("{}: {outcome}", target.display()));
        Ok(match restore {
            Restore::Leave if present == Present::Ours => Outcome::StillOurs,
            Restore::Leave if before == Before::File => Outcome::StillKept,
            _ => Outcome::Settled,
        })
    }

    fn present(&self, plugin: &str, record: &[(String, String)]) -> Result<Present> {
        let target = self.path.join(plugin);
        let Some(found) = look(&target)? else { return Ok(Present::Nothing) };
        ensure!(!found.is_dir(), "{}: a directory", target.display());
        let kept = look(&self.path.join(kept_name(plugin)))?;
        if kept.is_some_and(|kept| (kept.dev(), kept.ino()) == (found.dev(), found.ino())) {
            return Ok(Present::Kept);
        }
        if !found.is_file() {
            return Ok(Present::Other);
        }
        let sum = checksum(&target)?;
        let ours = record.iter().any(|(recorded, name)| name == plugin && *recorded == sum);
        Ok(if ours { Present::Ours } else { Present::Other })
    }

    fn before(&self, plugin: &str) -> Result<Before> {
        if look(&self.path.join(kept_name(plugin)))?.is_some() {
            return Ok(Before::File);
        }
        let none = look(&self.path.join(none_name(plugin)))?;
        Ok(if none.is_some() { Before::Nothing } else { Before::Unknown })
    }

    /// Checksum and plugin; no file, no lines.
    fn read_record(&self) -> Result<Vec<(String, String)>> {
        let path = self.path.join(RECORD);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == ErrorKind::NotFound => String::new(),
            Err(e) => return Err(e).with_context(|| path.display().to_string()),
        };
        let pair = |line: &str| line.split_once("  ").map(|(sum, name)| (sum.to_owned(), name.to_owned()));
        Ok(text.lines().filter_map(pair).collect())
    }

    fn write_record(&self, record: &[(String, String)]) -> Result<()> {
        let text: String = record.iter().map(|(sum, name)| format!("{sum}  {name}\n")).collect();
        let (path, unfinished) = (self.path.join(RECORD), self.path.join(format!("{RECORD}.new")));
        let write = || {
            let mut file = File::create(&unfinished)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&unfinished, &path)
        };
        write().with_context(|| path.display().to_string())?;
        self.sync()
    }

    fn sync(&self) -> Result<()> {
        self.handle.sync_all().with_context(|| format!("fsync {}", self.path.display()))
    }
}

/// A plugin that only needs to be renamed.
struct Prepared {
    path: PathBuf,
    /// SHA-256 in hexadecimal digits.
    checksum: String,
    /// Of the specification.
    newest_version: String,
}

fn kept_name(plugin: &str) -> String {
    format!("{plugin}.before-hawser")
}

fn none_name(plugin: &str) -> String {
    format!("{plugin}.none-before-hawser")
}

/// Of a symbolic link, the link.
fn look(path: &Path) -> Result<Option<fs::Metadata>> {
    match fs::symlink_metadata(path) {
        Ok(found) => Ok(Some(found)),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        Err(e) => Err(e).with_context(|| path.display().to_string()),
    }
}

fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => {
            Err(e).with_context(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

fn checksum(path: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    let mut file = File::open(path).with_context(|| path.display().to_string())?;
    file.read_to_end(&mut bytes).with_context(|| path.display().to_string())?;
    Ok(base16ct::lower::encode_string(&Sha256::digest(&bytes)))
}

/// The newest version of the specification that the plugin says it knows.
fn newest_version(plugin: &Path) -> Result<String> {
    let output = Command::new(plugin)
        .env_clear()
        .env("CNI_COMMAND", "VERSION")
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()?;
    ensure!(output.status.success(), "{}", output.status);
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).context("read the answer")?;
    let newest = answer["supportedVersions"].as_array().and_then(|versions| versions.last()?.as_str());
    newest.map(str::to_owned).context("the answer names no supportedVersions")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRESENT: [Present; 4] = [Present::Nothing, Present::Ours, Present::Kept, Present::Other];
    const BEFORE: [Before; 3] = [Before::Unknown, Before::Nothing, Before::File];

    #[test]
    fn what_is_kept_is_never_overwritten_and_what_was_there_is_always_kept() {
        for present in PRESENT {
            let first = before_install(present, Before::Unknown);
            assert_eq!(first == Remember::ThePresentOne, matches!(present, Present::Other | Present::Kept));
            let again = before_install(present, Before::File);
            assert!(matches!(again, Remember::Already | Remember::Stop), "{present:?}");
        }
        assert_eq!(before_install(Present::Other, Before::File), Remember::Stop);
    }

    #[test]
    fn put_back_touches_nothing_that_it_knows_not_to_be_ours() {
        for before in BEFORE {
            assert_eq!(to_put_back(Present::Other, before, true), Restore::Leave);
        }
        for present in PRESENT {
            assert_eq!(to_put_back(present, Before::Unknown, false), Restore::Leave);
        }
    }

    /// What `install_all` takes for a plugin.
    fn plugin(dir: &Path, name: &str, maker: &str) {
        let script = format!("#!/bin/sh\n# {maker}\necho '{{\"supportedVersions\":[\"1.1.0\"]}}'\n");
        fs::write(dir.join(name), script).unwrap();
        fs::set_permissions(dir.join(name), Permissions::from_mode(0o755)).unwrap();
    }

    /// A plugin directory of others' plugins in which ours are installed.
    fn installed() -> (tempfile::TempDir, tempfile::TempDir, Directory) {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for (_package, name) in binaries::CNI_PLUGINS {
            plugin(from.path(), name, "ours");
            plugin(to.path(), name, "theirs");
        }
        let directory = Directory::open(to.path()).unwrap();
        directory.install_all(from.path()).unwrap();
        (from, to, directory)
    }

    #[test]
    fn an_upgrade_by_others_is_left_alone_however_often_one_puts_back() {
        let (_from, to, directory) = installed();
        fs::remove_file(to.path().join("bridge")).unwrap();
        plugin(to.path(), "bridge", "upgraded");
        for _ in 0..2 {
            directory.put_back_all().unwrap();
            let maker = |name: &str| fs::read_to_string(to.path().join(name)).unwrap();
            assert!(maker("bridge").contains("# upgraded") && maker("portmap").contains("# theirs"));
            assert!(to.path().join("bridge.before-hawser").exists());
        }
        fs::remove_file(to.path().join("bridge.before-hawser")).unwrap();
        directory.put_back_all().unwrap();
        assert!(fs::read_to_string(to.path().join("bridge")).unwrap().contains("# upgraded"));
        assert!(!to.path().join(RECORD).exists());
    }

    #[test]
    fn ours_is_known_to_be_ours_however_often_one_fails_to_put_back() {
        let (_from, to, directory) = installed();
        fs::remove_file(to.path().join("portmap.before-hawser")).unwrap();
        for _ in 0..2 {
            let failed = directory.put_back_all().unwrap_err().to_string();
            assert_eq!(failed, "portmap: still ours, and what was there before is not known");
        }
    }

    #[test]
    fn put_back_restores_even_when_the_record_is_lost() {
        assert_eq!(to_put_back(Present::Other, Before::File, false), Restore::TheKeptOne);
        assert_eq!(to_put_back(Present::Other, Before::Nothing, false), Restore::RemoveOurs);
    }
}
