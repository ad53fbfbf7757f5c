//! Stages and targets, which are valid only while the machine runs: one file for each volume in
//! `boots/<boot id>`, written without a flush. Each line is a complete record, and the last one is
//! valid. So a step costs one write(2), and an interrupted write, a line without its end, is
//! ignored.
//!
//! A killed driver loses nothing. A power cut may lose lines, but it also ends the mounts and
//! processes that they describe. Records of another boot are carried over as far as they can be
//! read, without their processes.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::store::{FILE_MODE, Leftovers, is_disk_full, key_of};
use crate::error::{Error, Result, Step};
use crate::model::ids::VolumeId;
use crate::model::records::BootRecord;

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const BOOTS: &str = "boots";
const EXTENSION: &str = "jsonl";
/// Size limit of a file, since a volume may be staged for years. The space is reserved with the
/// first line: unstaging must not fail on a full disk.
const MOST_BYTES: u64 = 16 << 10;

/// A volume's record, or the reason why it is unreadable.
pub(super) type Found = std::result::Result<BootRecord, String>;

/// The directory of this boot.
#[derive(Debug)]
pub(super) struct BootDir {
    dir: PathBuf,
}

impl BootDir {
    /// Opens the directory, creates it if allowed, and reads it. With [`Leftovers::Remove`], the
    /// directories of other boots are gone afterwards.
    pub(super) fn open(state_dir: &Path, leftovers: Leftovers) -> Result<(Self, BTreeMap<VolumeId, Found>)> {
        let boots = state_dir.join(BOOTS);
        let this = Self { dir: boots.join(boot_id()?) };
        let mut others = list(&boots)?;
        others.retain(|dir| *dir != this.dir && is_of_a_boot(dir));
        if leftovers == Leftovers::Remove {
            others.iter().try_for_each(|other| forget_processes(other))?;
            // On a full disk, no other directory can be made.
            if let Some(other) = others.pop_if(|_| !this.dir.exists()) {
                std::fs::rename(&other, &this.dir)
                    .map_err(|e| linux::Error::at("rename", &other, e))
                    .step("open journal")?;
            }
            crate::kernel::private_dir::private_dir_all(&this.dir).step("open journal")?;
        }
        let mut found = this.read(leftovers)?;
        others.iter().try_for_each(|other| this.carry_over(other, leftovers, &mut found))?;
        Ok((this, found))
    }

    fn read(&self, leftovers: Leftovers) -> Result<BTreeMap<VolumeId, Found>> {
        let mut found = BTreeMap::new();
        for path in list(&self.dir)? {
            if let Some(id) = key_of(&path, EXTENSION) {
                let line = read(&path);
                match &line {
                    // A driver that runs at the same time has just removed it.
                    Err(_) if leftovers == Leftovers::Keep && !path.exists() => continue,
                    Ok(line) if leftovers == Leftovers::Remove => line.cut_what_follows(&path)?,
                    Ok(_) | Err(_) => {}
                }
                found.insert(id, line.map(|line| line.record));
            } else if leftovers == Leftovers::Remove {
                remove_temporary(&path)?;
            }
        }
        Ok(found)
    }

    /// Carries over what another boot left. May be killed at any point and repeated.
    fn carry_over(
        &self,
        other: &Path,
        leftovers: Leftovers,
        found: &mut BTreeMap<VolumeId, Found>,
    ) -> Result<()> {
        for path in list(other)? {
            let Some(id) = key_of(&path, EXTENSION) else { continue };
            if found.contains_key(&id) {
                continue;
            }
            let Ok(LastLine { record, .. }) = read(&path) else { continue };
            if leftovers == Leftovers::Remove {
                std::fs::rename(&path, self.path(&id))
                    .map_err(|e| linux::Error::at("rename", &path, e))
                    .step("open journal")?;
            }
            found.insert(id, Ok(record.after_the_boot()));
        }
        if leftovers == Leftovers::Remove {
            linux::tree::remove(other).step("open journal")?;
        }
        Ok(())
    }

    /// When it returns, every later reader of this boot sees the record.
    pub(super) fn put(&self, id: &VolumeId, record: &BootRecord) -> Result<()> {
        let path = self.path(id);
        if *record == BootRecord::default() {
            return linux::atomic_file::discard(&path).step("remove journal entry");
        }
        write(&path, record)
    }

    pub(super) fn path(&self, id: &VolumeId) -> PathBuf {
        id.under(&self.dir).with_extension(EXTENSION)
    }
}

/// Adds a line. On a full disk without reserved space, it replaces the last line: unstaging never
/// makes that line longer.
fn write(path: &Path, record: &BootRecord) -> Result<()> {
    let unwritable =
        |e: serde_json::Error| Error::JournalUnreadable { path: path.to_owned(), reason: e.to_string() };
    let mut line = serde_json::to_vec(record).map_err(unwritable)?;
    line.push(b'\n');
    match add(path, &line) {
        Err(error) if is_disk_full(&error) && overwrite_last(path, &line)? => Ok(()),
        outcome => outcome,
    }
}

/// Replaces the file by this one line if it has no space for another.
fn add(path: &Path, line: &[u8]) -> Result<()> {
    if linux::atomic_file::append(path, line, MOST_BYTES).step("write journal entry")? {
        return Ok(());
    }
    linux::atomic_file::replace(path, line, FILE_MODE).step("write journal entry")?;
    if let Err(error) = linux::atomic_file::reserve(path, MOST_BYTES) {
        let (path, error) = (path.display(), crate::error::chain(&error));
        tracing::debug!(%path, error, "could not reserve space for later lines");
    }
    Ok(())
}

/// Overwrites the last line if the new one fits, with one write(2) of the same length: a kill
/// leaves the old line or the new one. Returns whether it fitted.
pub(super) fn overwrite_last(path: &Path, line: &[u8]) -> Result<bool> {
    let Ok(last) = read(path) else { return Ok(false) };
    last.cut_what_follows(path)?;
    let Some(room) = (last.end - last.begin).checked_sub(line.len()) else { return Ok(false) };
    let (text, end) = line.split_at(line.len() - 1);
    let padded = [text, &vec![b' '; room], end].concat();
    linux::atomic_file::overwrite(path, last.begin as u64, &padded).step("write journal entry")?;
    Ok(true)
}

/// Updates `dir`, which another boot left: its processes are gone, and unreadable records are lost.
/// Lines are added to the existing files, whose space is reserved.
fn forget_processes(dir: &Path) -> Result<()> {
    for path in list(dir)?.into_iter().filter(|path| key_of::<VolumeId>(path, EXTENSION).is_some()) {
        match read(&path) {
            Ok(line) => {
                line.cut_what_follows(&path)?;
                let left = line.record.clone().after_the_boot();
                if left != line.record {
                    write(&path, &left)?;
                }
            }
            Err(reason) => {
                tracing::warn!(path = %path.display(), reason, "unreadable record of an earlier boot: ignored");
                linux::atomic_file::discard(&path).step("open journal")?;
            }
        }
    }
    Ok(())
}

/// The last complete line of a file.
pub(super) struct LastLine {
    record: BootRecord,
    pub(super) begin: usize,
    /// The offset of its end.
    pub(super) end: usize,
    /// The length of the file, which is larger if a later line was interrupted.
    pub(super) len: usize,
}

impl LastLine {
    /// Truncates an incomplete last line, so that the next one does not follow it. Needs no disk
    /// space, so the driver starts on a full disk.
    fn cut_what_follows(&self, path: &Path) -> Result<()> {
        if self.end == self.len {
            return Ok(());
        }
        let file = std::fs::OpenOptions::new().write(true).open(path);
        file.and_then(|file| file.set_len(self.end as u64))
            .map_err(|e| linux::Error::at("cut half a line", path, e))
            .step("open journal")
    }
}

fn read(path: &Path) -> std::result::Result<LastLine, String> {
    last_line(&linux::atomic_file::read(path).map_err(|e| e.to_string())?)
}

/// Of a file that may end within a line.
pub(super) fn last_line(text: &[u8]) -> std::result::Result<LastLine, String> {
    let is_end = |byte: &u8| *byte == b'\n';
    let end = text.iter().rposition(is_end).ok_or("not one whole line")? + 1;
    let lines = &text[..end - 1];
    let begin = lines.iter().rposition(is_end).map_or(0, |before| before + 1);
    let record = serde_json::from_slice(&lines[begin..]).map_err(|e| e.to_string())?;
    Ok(LastLine { record, begin, end, len: text.len() })
}

fn remove_temporary(path: &Path) -> Result<()> {
    if path.extension().is_some_and(|e| e == "tmp") {
        return linux::atomic_file::discard(path).step("remove temporary file");
    }
    tracing::warn!(path = %path.display(), "not a journal entry");
    Ok(())
}

/// The files in `dir`; none if it is missing.
fn list(dir: &Path) -> Result<Vec<PathBuf>> {
    let failed = |e| Error::Kernel { step: "open journal", source: linux::Error::at("list", dir, e) };
    match std::fs::read_dir(dir) {
        Ok(entries) => entries.map(|entry| entry.map(|e| e.path()).map_err(failed)).collect(),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(failed(e)),
    }
}

/// Whether the path is a directory with the id of a boot. Other programs may leave files here.
fn is_of_a_boot(path: &Path) -> bool {
    const ID_BYTES: usize = 36;
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    let is_id = name.len() == ID_BYTES && name.iter().all(|byte| byte.is_ascii_hexdigit() || *byte == b'-');
    let is_of_a_boot = is_id && std::fs::symlink_metadata(path).is_ok_and(|found| found.is_dir());
    if !is_of_a_boot {
        tracing::warn!(path = %path.display(), "not a directory of a boot");
    }
    is_of_a_boot
}

fn boot_id() -> Result<String> {
    let path = Path::new(BOOT_ID);
    let text = std::fs::read_to_string(path).map_err(|e| linux::Error::at("read", path, e));
    text.map(|text| text.trim().to_owned()).step("open journal")
}
