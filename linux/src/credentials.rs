//! Capabilities, file system uid and gid, and umask of a thread; and removal of what a process must
//! not keep from its start.
//!
//! Invariant: capabilities, fsuid and fsgid belong to a thread, not to the process. Functions that
//! limit the process must be called before it has a second thread.

#![expect(
    unsafe_code,
    reason = "the environment's memory is only reachable by pointer; keyctl has no safe wrapper"
)]

use std::ffi::{CString, OsString};
use std::marker::PhantomData;
use std::os::unix::ffi::OsStringExt;

use nix::errno::Errno;
use nix::unistd::{Gid, Uid, setfsgid, setfsuid};
pub use rustix::thread::CapabilitySet;
use rustix::thread::CapabilitySets;

use crate::{Error, Result};

/// This process's effective user; 0 is root.
pub fn effective_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Gives the calling thread an empty session keyring (keyctl(2), KEYCTL_JOIN_SESSION_KEYRING). The
/// inherited one holds the keys of the process that started it. A kernel without keyrings is a
/// success. The thread's effective and saved user must be root.
///
/// If the thread has a session keyring already, the new one counts against the quota of its real
/// user (security/keys/process_keys.c, `install_session_keyring_to_cred`). Any container of that
/// user may have used up that quota. Then the keyring is made for a user without keys.
pub fn join_new_session_keyring() -> Result<()> {
    let mut joined = try_join_new_session_keyring();
    for _ in 0..MOST_KEYRING_OWNERS {
        if joined != Err(Errno::EDQUOT) {
            break;
        }
        joined = as_real_user(any_high_uid()?, try_join_new_session_keyring)?;
    }
    match joined {
        Ok(()) | Err(Errno::ENOSYS) => Ok(()),
        Err(e) => Err(Error::new("join", "a new session keyring", e)),
    }
}

/// A randomly chosen user's quota may be used up too, but not those of several.
const MOST_KEYRING_OWNERS: usize = 8;

fn try_join_new_session_keyring() -> std::result::Result<(), Errno> {
    const JOIN_SESSION_KEYRING: libc::c_long = 1;
    let no_name: libc::c_long = 0;
    // SAFETY: the operation takes a string or null; it is null.
    let joined = unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, no_name) };
    Errno::result(joined).map(drop)
}

/// Runs `work` with another real user, which is the one that the key quota depends on. Effective
/// and saved user, and so all capabilities, stay.
fn as_real_user<T>(uid: rustix::process::Uid, work: impl FnOnce() -> T) -> Result<T> {
    let change = |uid| {
        rustix::thread::set_thread_res_uid(uid, None, None)
            .map_err(|e| Error::new("setresuid", format!("{uid:?}"), e))
    };
    let own = rustix::process::getuid();
    change(uid)?;
    let done = work();
    change(own)?;
    Ok(done)
}

/// A random uid above 2^31.
fn any_high_uid() -> Result<rustix::process::Uid> {
    // Not (uid_t)-1.
    let uid = (u32::from_ne_bytes(crate::random::bytes()?) | 1 << 31) & !1;
    Ok(rustix::process::Uid::from_raw(uid))
}

/// The three sets of the calling thread (capget(2)).
pub fn capabilities() -> Result<CapabilitySets> {
    rustix::thread::capabilities(None).map_err(|e| Error::new("read capabilities of", "this thread", e))
}

/// Makes effective, permitted and bounding set exactly `wanted`, and empties the inheritable and
/// the ambient set. The thread must hold `wanted`. Shrinking the bounding set needs CAP_SETPCAP.
pub fn limit_capabilities(wanted: CapabilitySet) -> Result<()> {
    limit_capabilities_but(CapabilitySet::empty(), wanted)
}

/// [`limit_capabilities`], but the capabilities in `for_now` that are held stay effective until
/// [`keep_capabilities`] is called.
pub fn limit_capabilities_but(for_now: CapabilitySet, wanted: CapabilitySet) -> Result<()> {
    let held = capabilities()?.permitted;
    if !held.contains(wanted) {
        return Err(Error::new("keep capabilities", names(wanted - held), Errno::EPERM));
    }
    for capability in bounding_set() {
        if !wanted.contains(capability) {
            rustix::thread::remove_capability_from_bounding_set(capability)
                .map_err(|e| Error::new("drop from the bounding set", names(capability), e))?;
        }
    }
    rustix::thread::clear_ambient_capability_set()
        .map_err(|e| Error::new("clear", "ambient capabilities", e))?;
    keep_capabilities(wanted | (held & for_now))
}

/// Makes the effective and the permitted set of the calling thread exactly `wanted`, which it
/// must hold (capset(2)).
pub fn keep_capabilities(wanted: CapabilitySet) -> Result<()> {
    rustix::thread::set_capabilities(
        None,
        CapabilitySets { effective: wanted, permitted: wanted, inheritable: CapabilitySet::empty() },
    )
    .map_err(|e| Error::new("set capabilities", names(wanted), e))
}

/// The capabilities in the bounding set that this kernel knows, one by one.
fn bounding_set() -> Vec<CapabilitySet> {
    (0..u64::BITS)
        .map(|number| CapabilitySet::from_bits_retain(1 << number))
        // EINVAL above the kernel's last capability.
        .filter(|one| rustix::thread::capability_is_in_bounding_set(*one).unwrap_or(false))
        .collect()
}

fn names(set: CapabilitySet) -> String {
    let known: Vec<&str> = set.iter_names().map(|(name, _)| name).collect();
    if known.is_empty() { format!("{:#x}", set.bits()) } else { known.join(" ") }
}

/// Leaves the calling thread in its own group alone. Needs CAP_SETGID if it is in others.
pub fn leave_supplementary_groups() -> Result<()> {
    let groups = rustix::process::getgroups().map_err(|e| Error::new("get", "supplementary groups", e))?;
    if groups.is_empty() {
        return Ok(());
    }
    nix::unistd::setgroups(&[]).map_err(|e| Error::new("setgroups", "no group", e))
}

/// Programs started by execve(2) can never gain privileges (prctl(2), PR_SET_NO_NEW_PRIVS).
pub fn set_no_new_privs() -> Result<()> {
    rustix::thread::set_no_new_privs(true).map_err(|e| Error::new("set", "no_new_privs", e))
}

/// The user on whose behalf a file is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    pub uid: u32,
    pub gid: u32,
}

/// Runs `body` on this thread with the fsuid and fsgid of `caller`, so that the file system gives
/// new files to that user, by the rules of setgid directories.
///
/// setfsuid(2) away from 0 drops the file capabilities from the effective set (capabilities(7)).
/// Those in `keep` are restored: the caller must have checked permissions with the user's
/// supplementary groups, which this thread does not have.
pub fn as_caller<T>(
    caller: Caller,
    keep: CapabilitySet,
    body: impl FnOnce() -> T,
) -> std::result::Result<T, Errno> {
    if caller.uid == 0 && caller.gid == 0 {
        return Ok(body());
    }
    let _restored_at_the_end = FsIds::set(caller)?;
    if caller.uid != 0 {
        let mut sets = rustix::thread::capabilities(None).map_err(errno)?;
        sets.effective |= keep & sets.permitted;
        rustix::thread::set_capabilities(None, sets).map_err(errno)?;
    }
    Ok(body())
}

/// Runs `body` without `capability` in this thread's effective set.
pub fn without_capability<T>(
    capability: CapabilitySet,
    body: impl FnOnce() -> T,
) -> std::result::Result<T, Errno> {
    let _restored_at_the_end = ReducedSets::without(capability)?;
    Ok(body())
}

/// A thread with other effective capabilities until the drop: its sets before that. The drop must be on the same
/// thread.
#[derive(Debug)]
pub(crate) struct ReducedSets {
    before: CapabilitySets,
    _of_this_thread: PhantomData<*const ()>,
}

impl ReducedSets {
    pub(crate) fn without(capability: CapabilitySet) -> std::result::Result<Self, Errno> {
        Self::keeping(CapabilitySet::empty(), capability)
    }

    /// `kept` is effective, as far as it is permitted; `lost` is not.
    pub(crate) fn keeping(kept: CapabilitySet, lost: CapabilitySet) -> std::result::Result<Self, Errno> {
        let before = rustix::thread::capabilities(None).map_err(errno)?;
        let effective = (before.effective | (kept & before.permitted)) - lost;
        rustix::thread::set_capabilities(None, CapabilitySets { effective, ..before }).map_err(errno)?;
        Ok(Self { before, _of_this_thread: PhantomData })
    }
}

impl Drop for ReducedSets {
    fn drop(&mut self) {
        // A thread may always make effective what it is permitted.
        let _cannot_fail = rustix::thread::set_capabilities(None, self.before);
    }
}

/// The ids to return to, on the same thread. Returning to fsuid 0 restores the file capabilities automatically
/// (capabilities(7)).
#[derive(Debug)]
pub(crate) struct FsIds {
    uid: Uid,
    gid: Gid,
    _of_this_thread: PhantomData<*const ()>,
}

impl FsIds {
    pub(crate) fn set(Caller { uid, gid }: Caller) -> std::result::Result<Self, Errno> {
        let before = Self {
            gid: setfsgid(Gid::from_raw(gid)),
            uid: setfsuid(Uid::from_raw(uid)),
            _of_this_thread: PhantomData,
        };
        // Neither call reports a failure; an impossible id changes nothing and returns the current
        // one.
        let refused = setfsgid(Gid::from_raw(u32::MAX)).as_raw() != gid
            || setfsuid(Uid::from_raw(u32::MAX)).as_raw() != uid;
        // `before` is restored on drop in either case.
        if refused { Err(Errno::EPERM) } else { Ok(before) }
    }
}

impl Drop for FsIds {
    fn drop(&mut self) {
        setfsuid(self.uid);
        setfsgid(self.gid);
    }
}

fn errno(error: rustix::io::Errno) -> Errno {
    Errno::from_raw(error.raw_os_error())
}

/// Closes every descriptor except stdin, stdout and stderr: the parent process may have leaked its
/// own. Must be called at the very start of `main`, before this process opens any, since those
/// would be closed while in use. `EBUSY` with a second thread, which could be opening one.
pub fn close_inherited_descriptors() -> Result<()> {
    let object = "inherited descriptors";
    require_single_thread("close", object)?;
    // SAFETY: close_range(2) takes no pointers. At the start of `main`, which
    // the caller promises, nothing in this process owns a descriptor above 2.
    let result = unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) };
    Errno::result(result).map(drop).map_err(|e| Error::new("close", object, e))
}

fn require_single_thread(op: &'static str, object: &str) -> Result<()> {
    let tasks = std::fs::read_dir("/proc/self/task").map_err(|e| Error::new("list", "/proc/self/task", e))?;
    if tasks.count() == 1 { Ok(()) } else { Err(Error::new(op, object, Errno::EBUSY)) }
}

/// Removes the environment variable `name`, and overwrites its value, which /proc/PID/environ would
/// show. `None` if it is not set. `EBUSY` with a second thread, which could be reading the
/// environment.
pub fn take_secret(name: &str) -> Result<Option<OsString>> {
    const OP: &str = "take from the environment";
    let variable = CString::new(name).map_err(|e| Error::new(OP, name, e))?;
    require_single_thread(OP, name)?;
    // SAFETY: the process has this one thread (counted above), so nothing else
    // reads or changes the environment; getenv(3) returns null or a string that
    // ends with NUL, and only its bytes before the NUL are written.
    unsafe {
        let value = libc::getenv(variable.as_ptr());
        if value.is_null() {
            return Ok(None);
        }
        let length = libc::strlen(value);
        let bytes = std::slice::from_raw_parts_mut(value.cast::<u8>(), length);
        let secret = OsString::from_vec(bytes.to_vec());
        bytes.fill(0);
        if libc::unsetenv(variable.as_ptr()) != 0 {
            return Err(Error::new(OP, name, Errno::last()));
        }
        Ok(Some(secret))
    }
}
