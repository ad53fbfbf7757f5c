//! A new session keyring on the kernel, for a user whose quota of keys is used up.

#![expect(unsafe_code, reason = "add_key and keyctl have no safe wrapper")]
#![expect(clippy::unwrap_used, reason = "a test ends at its first surprise")]

use nix::errno::Errno;
use nix::unistd::{Uid, setfsuid};

const SESSION_KEYRING: libc::c_long = -3;
const READ: libc::c_long = 11;

/// A key of the thread's file system user, with `length` bytes.
fn add_key(number: usize, length: usize) -> Result<(), Errno> {
    let name = std::ffi::CString::new(format!("hawser-{number}")).unwrap();
    let content = vec![b'x'; length];
    // SAFETY: two strings that end with a zero, and a buffer with its length.
    let added = unsafe {
        libc::syscall(
            libc::SYS_add_key,
            c"user".as_ptr(),
            name.as_ptr(),
            content.as_ptr(),
            content.len(),
            SESSION_KEYRING,
        )
    };
    Errno::result(added).map(drop)
}

/// Bytes of the serial numbers in the session keyring.
fn session_keyring_length() -> libc::c_long {
    let nowhere: *const u8 = std::ptr::null();
    // SAFETY: a length of zero asks for the length alone.
    let length = unsafe { libc::syscall(libc::SYS_keyctl, READ, SESSION_KEYRING, nowhere, 0) };
    Errno::result(length).unwrap()
}

/// Of one user, whom no other test has: the quota is the whole machine's.
#[test]
fn a_quota_of_keys_that_is_used_up_keeps_no_process_from_a_session_keyring_of_its_own() {
    let user = Uid::from_raw(0x7000_0000 | std::process::id());
    rustix::thread::set_thread_res_uid(rustix::process::Uid::from_raw(user.as_raw()), None, None).unwrap();
    linux::credentials::join_new_session_keyring().unwrap();
    setfsuid(user);
    // 20,000 bytes are the default of a user's quota; what is left is less than a keyring takes.
    let mut length = 4000;
    for number in 0..1000 {
        match add_key(number, length) {
            Ok(()) => {}
            Err(Errno::EDQUOT) if length > 1 => length /= 2,
            Err(refused) => {
                assert_eq!(refused, Errno::EDQUOT);
                break;
            }
        }
    }
    setfsuid(Uid::from_raw(0));
    assert!(session_keyring_length() > 0);

    linux::credentials::join_new_session_keyring().unwrap();
    assert_eq!(session_keyring_length(), 0);
    assert_eq!(nix::unistd::getuid(), user);
}
