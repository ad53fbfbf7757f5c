//! All timeouts of the driver. Every wait for a daemon, a pool or a mount has one of these limits.
//!
//! Invariant: the parts of one RPC fit into [`OPERATION`], which fits into kubelet's timeout of 120
//! s: an error is more useful to kubelet than no answer.

use std::time::Duration;

/// A call's wait for its turn; with [`OPERATION`] it fits into kubelet's 120 s.
pub(crate) const TURN: Duration = Duration::from_secs(10);
/// NodeUnpublishVolume's wait for the start of a daemon that is under way; its unmount then fits into
/// kubelet's 120 s.
pub(crate) const START_UNDER_WAY: Duration = Duration::from_secs(85);
/// One RPC.
pub(crate) const OPERATION: Duration = Duration::from_secs(100);
/// From a daemon's start until it dials in: for a process, and for a pod.
pub(crate) const START_PROCESS: Duration = Duration::from_secs(30);
pub(crate) const START_POD: Duration = Duration::from_secs(80);
/// From the connect to the Hello. Other daemons queue behind.
pub(crate) const HELLO: Duration = Duration::from_secs(5);
/// From the Assignment to the Answer: one FUSE_INIT, on a busy machine.
pub(crate) const ANSWER: Duration = Duration::from_secs(10);
/// From the Assignment until a daemon is ready to follow another one, which serves meanwhile.
pub(crate) const PREPARE: Duration = Duration::from_secs(10);
/// From the end of the earlier daemon until the next one serves, while users wait. Then a daemon of the
/// earlier program follows.
pub(crate) const PROCEED: Duration = Duration::from_secs(5);
/// Each request that shows whether a daemon that has followed another one answers.
pub(crate) const FOLLOWS: Duration = Duration::from_secs(2);
/// One request on a control socket.
pub(crate) const CONTROL: Duration = Duration::from_secs(5);
/// A user's request, while the daemon answers no other one either. After three times this limit the
/// daemon is hung. Default of `--daemon-deadline`.
pub(crate) const DAEMON: Duration = Duration::from_secs(20);
/// Opening a volume's directory in the pool.
pub(crate) const POOL: Duration = Duration::from_secs(5);
/// Checking that a served volume is still the one in the pool.
pub(crate) const POOL_LOOK: Duration = Duration::from_secs(2);
/// Resolving the links of a path in a call.
pub(crate) const PATH_LOOK: Duration = Duration::from_secs(2);
/// statvfs of a mounted volume.
pub(crate) const STATISTICS: Duration = Duration::from_secs(2);
/// umount(2) of a FUSE mount, which waits for the daemon only if written pages are left; also the
/// wait for a mount in use before its connection is aborted.
pub(crate) const UNMOUNT: Duration = Duration::from_secs(10);
/// Closing of the files of a pod that was just killed.
pub(crate) const CLOSING: Duration = Duration::from_secs(1);
/// syncfs(2) of a mounted volume, which flushes writes through mappings, and the writing back of what the
/// kernel keeps of it.
pub(crate) const SYNCFS: Duration = Duration::from_secs(20);
/// syncfs(2) of the pool before a cut, which has unwritten data of all volumes.
pub(crate) const POOL_SYNC: Duration = Duration::from_secs(45);
/// Changing the group of a volume in use, file by file.
pub(crate) const GIVE_GROUP: Duration = Duration::from_secs(60);
/// Lease of a pause: how long a daemon holds its writers back without hearing from the driver.
pub(crate) const QUIESCE: Duration = Duration::from_secs(15);
/// Renewal interval of that lease.
pub(crate) const QUIESCE_RENEWAL: Duration = Duration::from_secs(5);
/// CreateVolume's wait for a copy; the copy continues afterwards.
pub(crate) const FILL: Duration = Duration::from_secs(90);
/// Cancelling a copy, which checks between two pieces of a file.
pub(crate) const CANCEL: Duration = Duration::from_secs(10);
/// The wait at the driver's start for all daemons that it ends, together. Then the driver serves,
/// and continues to wait for each volume separately.
pub(crate) const START: Duration = Duration::from_secs(5);
/// Calls under way at SIGTERM. A stopped client, which does not answer HTTP/2's PING, gets no
/// longer.
pub(crate) const LAST_CALLS: Duration = Duration::from_secs(10);
/// Retry interval for ending a parked volume while another operation is under way, or after a
/// failure.
pub(crate) const PARKED_RETRY: Duration = Duration::from_secs(1);
/// One reader of the driver's metrics; the next waits until it ends.
pub(crate) const SCRAPE: Duration = Duration::from_secs(5);

/// sun_path of unix(7), without its terminating zero.
pub(crate) const MAX_SOCKET_PATH_BYTES: usize = 107;
/// Longest run directory whose sockets can be bound: `/<32 digits>/dial.sock` follows it, and no
/// other socket has a longer name.
pub(crate) const MAX_RUN_DIR_BYTES: usize = MAX_SOCKET_PATH_BYTES - 1 - 32 - 1 - "dial.sock".len();
