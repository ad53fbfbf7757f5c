//! Only one ADD at a time changes a bridge and its ports.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Duration;

use linux::Error;
use linux::lock::TransientLock;

/// A call may wait three times: for its links, its gateways, and its roll-back. Together that is
/// within the two minutes that the kubelet allows for a pod's network.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Held until dropped.
#[derive(Debug)]
pub(crate) struct BridgeLock {
    _lock: TransientLock,
}

impl BridgeLock {
    /// Waits for the lock of the bridge called `bridge` (a valid interface name), at most half a
    /// minute. If /run accepts no files, all bridges of the network namespace share one lock.
    pub(crate) fn take(bridge: &str) -> Result<Self, Error> {
        Self::within(TIMEOUT, bridge)
    }

    fn within(timeout: Duration, bridge: &str) -> Result<Self, Error> {
        let taken = TransientLock::take_or_of_namespace(&path(bridge), timeout);
        let named = |Error { op, object, source }| {
            let waited = source.kind() == ErrorKind::TimedOut;
            let op = if waited { "wait for other calls that change bridge" } else { op };
            let object = if waited { format!("{bridge} ({object})") } else { object };
            Error { op, object, source }
        };
        Ok(Self { _lock: taken.map_err(named)? })
    }
}

fn path(bridge: &str) -> PathBuf {
    TransientLock::path(&format!("bridge-{bridge}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_for_nobody_does_not_say_so() {
        assert!(nix::unistd::geteuid().is_root(), "lock files lie in /run: run it as root");
        let bridge = format!("t{}dir", std::process::id());
        let path = path(&bridge);
        std::fs::create_dir(&path).unwrap();
        let refused = BridgeLock::take(&bridge).unwrap_err();
        std::fs::remove_dir(&path).unwrap();
        assert_eq!(refused.to_string(), format!("open lock {}", path.display()));
        assert_eq!(refused.errno(), nix::errno::Errno::EISDIR);
    }

    #[test]
    fn who_waits_too_long_hears_for_whom() {
        assert!(nix::unistd::geteuid().is_root(), "lock files lie in /run: run it as root");
        let bridge = format!("t{}lock", std::process::id());
        let held = BridgeLock::take(&bridge).unwrap();
        let refused =
            cni_plugin::CniError::chain(&BridgeLock::within(Duration::from_millis(20), &bridge).unwrap_err());
        let (path, pid) = (path(&bridge), std::process::id());
        assert_eq!(
            refused.msg,
            format!(
                "wait for other calls that change bridge {bridge} ({}): process {pid} still holds it after 20ms",
                path.display()
            )
        );
        drop(held);
        drop(BridgeLock::take(&bridge).unwrap());
        // Who came too late gets it in the end, and gives it back.
        let before = std::time::Instant::now();
        while path.exists() {
            assert!(before.elapsed() < TIMEOUT);
            std::thread::yield_now();
        }
    }
}
