//! How long everything may take, in one place: whatever waits for a daemon, a
//! pool or a mount has one of these as its end.
//!
//! Invariant: the parts of one RPC fit into [`OPERATION`], and that into the
//! 120 s that kubelet waits: an answer says more than its silence.

use std::time::Duration;

/// A call's wait for its turn, before it begins; with [`OPERATION`] it fits into kubelet's 120 s.
pub(crate) const TURN: Duration = Duration::from_secs(10);
/// One RPC.
pub(crate) const OPERATION: Duration = Duration::from_secs(100);
/// From the start of a daemon until it dials in: a process, and a pod.
pub(crate) const START_PROCESS: Duration = Duration::from_secs(30);
pub(crate) const START_POD: Duration = Duration::from_secs(80);
/// Who has dialled says Hello at once; others wait behind it.
pub(crate) const HELLO: Duration = Duration::from_secs(5);
/// From the Assignment to the Answer: one FUSE_INIT, on a busy machine.
pub(crate) const ANSWER: Duration = Duration::from_secs(10);
/// One request on a control socket.
pub(crate) const CONTROL: Duration = Duration::from_secs(5);
/// A request of a volume's user, while the daemon answers no other either: three times
/// that, and the daemon is hung. A default of `--daemon-deadline`.
pub(crate) const DAEMON: Duration = Duration::from_secs(20);
/// Opening a volume's directory in the pool.
pub(crate) const POOL: Duration = Duration::from_secs(5);
/// Whether a volume that is served already is still the one that the pool has.
pub(crate) const POOL_LOOK: Duration = Duration::from_secs(2);
/// Following the links of a path that a call names.
pub(crate) const PATH_LOOK: Duration = Duration::from_secs(2);
/// statvfs of a mounted volume.
pub(crate) const STATISTICS: Duration = Duration::from_secs(2);
/// umount(2) of a FUSE mount, which waits for the daemon only where written pages
/// are left; and how long a mount that is in use is waited for before its connection
/// is aborted.
pub(crate) const UNMOUNT: Duration = Duration::from_secs(10);
/// How long the files of a pod that was just killed may take to close.
pub(crate) const CLOSING: Duration = Duration::from_secs(1);
/// syncfs(2) of a mounted volume, which sends what was written through mappings.
pub(crate) const SYNCFS: Duration = Duration::from_secs(20);
/// Giving a volume in use to a group, file by file.
pub(crate) const GIVE_GROUP: Duration = Duration::from_secs(60);
/// How long a daemon holds its writers back without hearing from the driver.
pub(crate) const QUIESCE: Duration = Duration::from_secs(15);
/// How often it hears.
pub(crate) const QUIESCE_RENEWAL: Duration = Duration::from_secs(5);
/// CreateVolume's wait for a copy, which goes on.
pub(crate) const FILL: Duration = Duration::from_secs(90);
/// A copy looks whether it is to stop between one piece of a file and the next.
pub(crate) const CANCEL: Duration = Duration::from_secs(10);
/// A driver's start, for all the daemons together that it ends. Then it serves, and the wait
/// goes on for each volume by itself.
pub(crate) const START: Duration = Duration::from_secs(5);
/// What is under way at SIGTERM. A client that is stopped itself (and does not
/// answer HTTP/2's PING) gets no longer.
pub(crate) const LAST_CALLS: Duration = Duration::from_secs(10);
/// The end of a parked volume is tried again after this while another operation is
/// under way, or after it has failed.
pub(crate) const PARKED_AGAIN: Duration = Duration::from_secs(1);
/// One reader of the driver's metrics; the next waits for its end.
pub(crate) const SCRAPE: Duration = Duration::from_secs(5);

/// sun_path of unix(7), without its terminating zero.
pub(crate) const MAX_SOCKET_PATH_BYTES: usize = 107;
/// Longest run directory whose sockets can be bound: `/<32 digits>/dial.sock`
/// follows it, and no other socket's name is longer.
pub(crate) const MAX_RUN_DIR_BYTES: usize = MAX_SOCKET_PATH_BYTES - 1 - 32 - 1 - "dial.sock".len();
