//! Which system calls are steps, and what they are done to.

use std::fs;
use std::path::{Path, PathBuf};

use nix::libc::{self, c_long, user_regs_struct};
use nix::unistd::Pid;

use super::{Kind, Places};
use crate::trace_calls::{read_at, text_at};

/// What an argument says.
#[derive(Debug, Clone, Copy)]
enum Argument {
    /// A path.
    Path(usize),
    /// A directory's descriptor, and a path from there in the next argument.
    At(usize),
    /// The descriptor of a file.
    File(usize),
    /// A text that is shown as it is: what is mounted.
    Text(usize),
    /// The address of a unix socket.
    Address(usize),
    /// Nothing that has a name of its own.
    Nameless,
}
use Argument::{Address, At, File, Nameless, Path as PathAt, Text};

const KNOWN: [(c_long, &str, &[Argument], Kind); 56] = [
    (libc::SYS_open, "open", &[PathAt(0)], Kind::Effect),
    (libc::SYS_openat, "openat", &[At(0)], Kind::Effect),
    (libc::SYS_openat2, "openat2", &[At(0)], Kind::Effect),
    (libc::SYS_creat, "creat", &[PathAt(0)], Kind::Effect),
    (libc::SYS_write, "write", &[File(0)], Kind::Effect),
    (libc::SYS_writev, "writev", &[File(0)], Kind::Effect),
    (libc::SYS_pwrite64, "pwrite64", &[File(0)], Kind::Effect),
    (libc::SYS_copy_file_range, "copy_file_range", &[File(2)], Kind::Effect),
    (libc::SYS_sendfile, "sendfile", &[File(0)], Kind::Effect),
    (libc::SYS_ioctl, "ioctl", &[File(0)], Kind::Effect),
    (libc::SYS_ftruncate, "ftruncate", &[File(0)], Kind::Effect),
    (libc::SYS_fallocate, "fallocate", &[File(0)], Kind::Effect),
    (libc::SYS_mkdir, "mkdir", &[PathAt(0)], Kind::Effect),
    (libc::SYS_mkdirat, "mkdirat", &[At(0)], Kind::Effect),
    (libc::SYS_mknodat, "mknodat", &[At(0)], Kind::Effect),
    (libc::SYS_rmdir, "rmdir", &[PathAt(0)], Kind::Effect),
    (libc::SYS_unlink, "unlink", &[PathAt(0)], Kind::Effect),
    (libc::SYS_unlinkat, "unlinkat", &[At(0)], Kind::Effect),
    (libc::SYS_rename, "rename", &[PathAt(0), PathAt(1)], Kind::Effect),
    (libc::SYS_renameat, "renameat", &[At(0), At(2)], Kind::Effect),
    (libc::SYS_renameat2, "renameat2", &[At(0), At(2)], Kind::Effect),
    (libc::SYS_link, "link", &[PathAt(0), PathAt(1)], Kind::Effect),
    (libc::SYS_linkat, "linkat", &[At(0), At(2)], Kind::Effect),
    (libc::SYS_symlink, "symlink", &[PathAt(1)], Kind::Effect),
    (libc::SYS_symlinkat, "symlinkat", &[At(1)], Kind::Effect),
    (libc::SYS_chmod, "chmod", &[PathAt(0)], Kind::Effect),
    (libc::SYS_fchmod, "fchmod", &[File(0)], Kind::Effect),
    (libc::SYS_fchmodat, "fchmodat", &[At(0)], Kind::Effect),
    (libc::SYS_fchown, "fchown", &[File(0)], Kind::Effect),
    (libc::SYS_fchownat, "fchownat", &[At(0)], Kind::Effect),
    (libc::SYS_utimensat, "utimensat", &[At(0)], Kind::Effect),
    (libc::SYS_setxattr, "setxattr", &[PathAt(0)], Kind::Effect),
    (libc::SYS_lsetxattr, "lsetxattr", &[PathAt(0)], Kind::Effect),
    (libc::SYS_fsetxattr, "fsetxattr", &[File(0)], Kind::Effect),
    (libc::SYS_fsync, "fsync", &[File(0)], Kind::Sync),
    (libc::SYS_fdatasync, "fdatasync", &[File(0)], Kind::Sync),
    (libc::SYS_syncfs, "syncfs", &[File(0)], Kind::Sync),
    (libc::SYS_read, "read", &[File(0)], Kind::Look),
    (libc::SYS_getdents64, "getdents64", &[File(0)], Kind::Look),
    (libc::SYS_statx, "statx", &[At(0)], Kind::Look),
    (libc::SYS_newfstatat, "newfstatat", &[At(0)], Kind::Look),
    (libc::SYS_recvmsg, "recvmsg", &[Nameless], Kind::Look),
    (libc::SYS_socket, "socket", &[Nameless], Kind::Look),
    (libc::SYS_pidfd_open, "pidfd_open", &[Nameless], Kind::Look),
    (libc::SYS_mount, "mount", &[Text(0), PathAt(1)], Kind::Effect),
    (libc::SYS_umount2, "umount2", &[PathAt(0)], Kind::Effect),
    (libc::SYS_fsmount, "fsmount", &[Nameless], Kind::Effect),
    (libc::SYS_move_mount, "move_mount", &[At(2)], Kind::Effect),
    (libc::SYS_mount_setattr, "mount_setattr", &[At(0)], Kind::Effect),
    (libc::SYS_open_tree, "open_tree", &[At(0)], Kind::Effect),
    (libc::SYS_bind, "bind", &[Address(1)], Kind::Effect),
    (libc::SYS_sendmsg, "sendmsg", &[Nameless], Kind::Effect),
    (libc::SYS_clone, "clone", &[Nameless], Kind::Effect),
    (libc::SYS_clone3, "clone3", &[Nameless], Kind::Effect),
    (libc::SYS_vfork, "vfork", &[Nameless], Kind::Effect),
    (libc::SYS_pidfd_send_signal, "pidfd_send_signal", &[Nameless], Kind::Effect),
];

/// linux/fs.h: `_IOW(0x94, 9, int)`.
/// FICLONE; of Btrfs: a new subvolume, a snapshot, a deletion and a limit; of ext4 and XFS: a project.
const CHANGING_IOCTLS: [u64; 6] =
    [0x4004_9409, 0x5000_9418, 0x5000_9417, 0x5000_943f, 0x8030_942b, 0x401c_5820];
const CREATING: u64 = (libc::O_CREAT | libc::O_TRUNC | libc::O_TMPFILE & !libc::O_DIRECTORY) as u64;
const CLONE_THREAD: u64 = libc::CLONE_THREAD as u64;
/// A descriptor that stands for the working directory.
const AT_FDCWD: i32 = libc::AT_FDCWD;

pub(super) struct Described {
    pub(super) name: &'static str,
    pub(super) object: String,
    pub(super) kind: Kind,
}

/// `None` for what is no step. `process` is in the names of temporary files.
pub(super) fn describe(
    thread: Pid,
    registers: &user_regs_struct,
    places: &Places,
    process: Pid,
) -> Option<Described> {
    let r = registers;
    let number = r.orig_rax.cast_signed();
    let (_, mut name, arguments, kind) = *KNOWN.iter().find(|(known, ..)| *known == number)?;
    let values = [r.rdi, r.rsi, r.rdx, r.r10, r.r8, r.r9];
    let number_at = |address| read_at::<8>(thread, address).map(u64::from_ne_bytes);
    let creates = |flags: u64| if flags & CREATING != 0 { Kind::Effect } else { Kind::Look };
    let kind = match name {
        "open" => creates(r.rsi),
        "openat" => creates(r.rdx),
        "openat2" => creates(number_at(r.rdx)?),
        "ioctl" if !CHANGING_IOCTLS.contains(&r.rsi) => return None,
        "clone" if r.rdi & CLONE_THREAD != 0 => Kind::Thread,
        "clone3" if number_at(r.rdi)? & CLONE_THREAD != 0 => Kind::Thread,
        _ => kind,
    };
    if kind == Kind::Thread {
        name = "thread";
    }
    let shown = |path: PathBuf| show(&path, places, process);
    let mut objects = Vec::new();
    for argument in arguments {
        match *argument {
            PathAt(at) => objects.push(shown(path_from(thread, AT_FDCWD, values[at])?)?),
            At(at) => objects.push(shown(path_from(thread, descriptor(values[at]), values[at + 1])?)?),
            File(at) => objects.push(shown(file(thread, descriptor(values[at]))?)?),
            // What is bound is a path; what else is mounted has a name.
            Text(at) => {
                let text = text_at(thread, values[at]).unwrap_or_default();
                objects.push(shown(PathBuf::from(&text)).unwrap_or(text));
            }
            // sun_path follows the family.
            Address(at) => objects.push(shown(PathBuf::from(text_at(thread, values[at] + 2)?))?),
            Nameless => {}
        }
    }
    Some(Described { name, object: objects.join(" -> "), kind })
}

/// An int that was passed in a register.
fn descriptor(value: u64) -> i32 {
    let [a, b, c, d, ..] = value.to_le_bytes();
    i32::from_le_bytes([a, b, c, d])
}

fn file(thread: Pid, fd: i32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{thread}/fd/{fd}")).ok()
}

fn path_from(thread: Pid, directory: i32, text: u64) -> Option<PathBuf> {
    let path = PathBuf::from(text_at(thread, text)?);
    // A file that is named by its descriptor, or a name in an open directory.
    let mut below = path.strip_prefix("/proc/self/fd").unwrap_or(Path::new("")).iter();
    if let Some(fd) = below.next() {
        let opened = file(thread, fd.to_str()?.parse().ok()?)?;
        return Some(below.fold(opened, |path, name| path.join(name)));
    }
    if path.is_absolute() {
        return Some(path);
    }
    let directory = match directory {
        AT_FDCWD => fs::read_link(format!("/proc/{thread}/cwd")).ok()?,
        directory => file(thread, directory)?,
    };
    Some(if path.as_os_str().is_empty() || path == Path::new(".") { directory } else { directory.join(path) })
}

/// What it is called in every run; `None` for what is not of the process's work.
fn show(path: &Path, places: &Places, process: Pid) -> Option<String> {
    if places.ignored.iter().any(|ignored| path.starts_with(ignored) || path.ends_with(ignored)) {
        return None;
    }
    // The root of a mount that is not attached yet.
    if path == Path::new("/") {
        return Some("/".to_owned());
    }
    let last = path.file_name()?.to_str()?;
    let (prefix, below) = match path.strip_prefix(&places.root) {
        Ok(below) => ("$", below),
        // fusectl, wherever it is mounted, or nowhere.
        Err(_) if matches!(last, "abort" | "waiting") => ("", path),
        Err(_) if path.starts_with("/proc") || path == Path::new("/dev/fuse") => ("", path),
        Err(_) => return None,
    };
    let process = format!(".{process}.");
    let component = |component: std::path::Component<'_>| {
        let text = component.as_os_str().to_string_lossy().replace(&process, ".PID.");
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let unnamed = text.trim_end_matches(" (deleted)").strip_prefix('#').is_some_and(is_number);
        match text {
            text if is_number(&text) => "N".to_owned(),
            _ if unnamed => "#".to_owned(),
            text => text,
        }
    };
    let components = below.components().filter(|c| !matches!(c, std::path::Component::RootDir));
    Some(components.fold(prefix.to_owned(), |shown, c| shown + "/" + &component(c)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_one_name_in_every_run_and_strangers_have_none() {
        let places = Places { root: "/tmp/hw-1".into(), ignored: vec!["/tmp/hw-1/driver.log".into()] };
        let shown = |path: &str| show(Path::new(path), &places, Pid::from_raw(77));
        assert_eq!(
            shown("/tmp/hw-1/state/.vol-1.json.77.tmp").as_deref(),
            Some("$/state/.vol-1.json.PID.tmp")
        );
        assert_eq!(shown("/tmp/hw-1/pool/#123 (deleted)").as_deref(), Some("$/pool/#"));
        assert_eq!(shown("/proc/self/mountinfo").as_deref(), Some("/proc/self/mountinfo"));
        assert_eq!(shown("/proc/123/stat").as_deref(), Some("/proc/N/stat"));
        assert_eq!(shown("/55/abort").as_deref(), Some("/N/abort"));
        for stranger in ["/tmp/hw-1/driver.log", "/etc/passwd", "socket:[12]", "/tmp/hw-12/file"] {
            assert_eq!(shown(stranger), None, "{stranger}");
        }
    }
}
