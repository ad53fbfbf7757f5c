//! Kernel keyrings, which no namespace separates.

#![cfg(target_arch = "x86_64")]
#![expect(unsafe_code, reason = "add_key and keyctl have no safe wrapper")]

use nix::errno::Errno;
use proto::cri::ContainerConfig;
use tests::cri::{Host, container, image_spec, layer, write_layout};

use crate::seccomp::probe;

const KEYCTL: u32 = 250;
const KEYCTL_REVOKE: u64 = 3;
const EACCES: i32 = 13;

/// The serial number of a new key in a new session keyring of this thread.
fn key_in_a_session_of_its_own() -> u32 {
    const SESSION_KEYRING: i32 = -3;
    linux::credentials::join_new_session_keyring().unwrap();
    let (kind, name, secret) = (c"user", c"hawser-test", b"secret");
    // SAFETY: two strings that end with a zero, and a buffer with its length.
    let key = unsafe {
        libc::syscall(
            libc::SYS_add_key,
            kind.as_ptr(),
            name.as_ptr(),
            secret.as_ptr(),
            secret.len(),
            SESSION_KEYRING,
        )
    };
    Errno::result(key).unwrap().try_into().unwrap()
}

/// Who has a key in its session keyring possesses it, and may read and revoke it.
#[tokio::test]
async fn a_container_possesses_no_key_of_the_session_that_started_the_runtime() {
    let mut host = Host::new();
    let key = key_in_a_session_of_its_own();
    let mut cri = host.start().await;
    let revoke = probe(KEYCTL, KEYCTL_REVOKE, key, 0);
    write_layout(&host.path("images/probe"), "probe:1", &layer(&[("revoke", 0o755, &revoke)]));
    cri.pull("probe:1").await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let config = ContainerConfig { image: Some(image_spec("probe:1")), ..container("revoke", &["/revoke"]) };
    assert_eq!(cri.run(&pod, config).await.exit_code, EACCES);
    cri.remove_pod(&pod).await;
    host.assert_clean();
}
