//! A project quota, set and seen at work: the base of volumes whose capacity
//! the kernel keeps.

use std::fs::{self, File};
use std::io::Write;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use linux::credentials::{CapabilitySet, capabilities, limit_capabilities};
use linux::project_quota::{Limits, assign, limit, project_of, usage};
use nix::errno::Errno;

const MIB: u64 = 1 << 20;
const IMAGE_BYTES: u64 = 512 * MIB;
const PROJECT: NonZeroU32 = NonZeroU32::new(4711).unwrap();

pub(super) fn enforced_on_ext4() -> Result<()> {
    enforced("ext4", &["mkfs.ext4", "-q", "-E", "nodiscard", "-O", "quota,project"], Errno::EDQUOT)
}

/// XFS answers as if the project's directory were a disk of that size.
pub(super) fn enforced_on_xfs() -> Result<()> {
    enforced("xfs", &["mkfs.xfs", "-q", "-K"], Errno::ENOSPC)
}

fn enforced(kind: &str, mkfs: &[&str], refusal: Errno) -> Result<()> {
    // ext4 enforces no quota on who has CAP_SYS_RESOURCE, and capabilities are a thread's.
    let held = capabilities()?.permitted;
    limit_capabilities(held - CapabilitySet::SYS_RESOURCE)?;
    let root = mounted(kind, mkfs)?;
    let mount = File::open(&root).context("open the mount")?;
    let limited = root.join("limited");
    fs::create_dir(&limited).context("make the project's directory")?;
    ensure!(project_of(&mount)?.is_none(), "a new file system's root has a project");
    assign(File::open(&limited)?, PROJECT)?;
    limit(&mount, PROJECT, Limits { bytes: MIB, inodes: 8 })?;

    let inner = limited.join("inner");
    fs::create_dir(&inner)?;
    ensure!(project_of(File::open(&inner)?)? == Some(PROJECT), "a new directory is not of the project");
    let written = write_until_refused(&inner.join("data"), 2 * MIB, refusal)?;
    ensure!(written > MIB / 2 && written <= MIB, "refused after {written} bytes, not at {MIB}");
    let taken = usage(&mount, PROJECT)?;
    ensure!(taken.bytes > MIB / 2 && taken.bytes <= MIB, "{taken:?} of {MIB} bytes");
    // limited, inner, data
    ensure!(taken.inodes == 3, "{taken:?}: 3 files");

    File::create(inner.join("data")).context("empty the file")?;
    for number in 0..5 {
        fs::write(limited.join(format!("file-{number}")), "").context("a file within the limit")?;
    }
    expect_refusal(File::create(limited.join("one-too-many")), refusal)?;
    fs::write(root.join("outside"), vec![0; 4 << 20]).context("who has no quota is not limited")?;
    expect_refusal(fs::rename(root.join("outside"), limited.join("moved")), Errno::EXDEV)?;

    limit(&mount, PROJECT, Limits { bytes: 4 * MIB, inodes: 100 })?;
    fs::write(limited.join("more"), vec![0; 2 << 20]).context("a quota that was raised")?;
    drop(mount);
    run(&["umount", &root.to_string_lossy()])
}

fn mounted(kind: &str, mkfs: &[&str]) -> Result<PathBuf> {
    let image = PathBuf::from(format!("/var/lib/quota-{kind}.img"));
    File::create(&image)?.set_len(IMAGE_BYTES)?;
    let root = PathBuf::from(format!("/mnt/{kind}"));
    fs::create_dir_all(&root)?;
    run(&[mkfs, &[&image.to_string_lossy()]].concat())?;
    let (image, at) = (image.to_string_lossy(), root.to_string_lossy());
    run(&["mount", "-t", kind, "-o", "loop,prjquota", &image, &at])?;
    Ok(root)
}

fn run(words: &[&str]) -> Result<()> {
    let status = Command::new(words[0]).args(&words[1..]).status().with_context(|| words[0].to_owned())?;
    ensure!(status.success(), "{}: {status}", words.join(" "));
    Ok(())
}

/// The bytes that were taken before the refusal.
fn write_until_refused(path: &Path, bytes: u64, refusal: Errno) -> Result<u64> {
    let mut file = File::create(path).context("create")?;
    let piece = [7; 16 << 10];
    let mut written = 0;
    while written < bytes {
        match file.write(&piece) {
            Ok(0) => bail!("a write of nothing after {written} bytes"),
            Ok(count) => written += count as u64,
            Err(e) if e.raw_os_error() == Some(refusal as i32) => return Ok(written),
            Err(e) => return Err(e).with_context(|| format!("write after {written} bytes")),
        }
    }
    bail!("{written} bytes were written, and the quota was not enforced")
}

fn expect_refusal<T>(done: std::io::Result<T>, refusal: Errno) -> Result<()> {
    match done {
        Err(e) if e.raw_os_error() == Some(refusal as i32) => Ok(()),
        Err(e) => Err(e).with_context(|| format!("expected {refusal}")),
        Ok(_) => bail!("succeeded where {refusal} was expected"),
    }
}
