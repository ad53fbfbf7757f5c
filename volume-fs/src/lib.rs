//! The file system process of one volume: a POSIX file system over a directory
//! that arrives as a descriptor of a detached mount, served on a FUSE
//! connection that arrives as a descriptor too.
//!
//! Start to end: [`handover`] dials the driver, [`confine`] gives up what the
//! process will not need, `handover` receives the descriptors, fuser
//! answers FUSE_INIT, [`seccomp`] closes the door, the driver is told, its
//! socket is closed, and the event loops run until the unmount.
//!
//! In the middle: `filesystem` speaks fuser, `volume` is the file system,
//! `nodes` knows which file a node id is, `pruner` has the kernel forget them, `directory` and `handles` are what
//! is open. `quota` knows what the volume uses, which `count` finds out and
//! `usage_file` keeps; [`control`] answers the driver, and shuts the `gate`
//! that every change goes through; it shows the `metrics` too.
//!
//! Invariant: no path of the host is ever used; every name is one component
//! below a descriptor inside the volume, and no symbolic link is followed.

mod attributes;
pub mod config;
pub mod confine;
pub mod control;
mod count;
mod directory;
mod errno;
mod error;
mod file;
mod filesystem;
mod gate;
mod handles;
pub mod handover;
mod metrics;
mod nodes;
mod pruner;
mod quota;
pub mod seccomp;
mod usage_file;
mod volume;
mod xattrs;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use fuser::{Session, SessionACL};
use linux::fs_at::DescriptorDir;
use nix::sys::signal::{SigSet, Signal};

pub use crate::error::{Error, Result};

use crate::config::{Arguments, Command, Serve};
use crate::confine::Isolation;
use crate::control::Subject;
use crate::filesystem::VolumeFilesystem;
use crate::gate::{Gate, Reason};
use crate::handover::{Assignment, Dialled};
use crate::metrics::Metrics;
use crate::nodes::NodeLimits;
use crate::pruner::MountPoints;
use crate::quota::{Counted, Quota, Use};
use crate::usage_file::{BootId, UsageFile};
use crate::volume::Volume;

/// Runs the command line to its end: `Ok` once the volume is unmounted.
pub fn run(arguments: Arguments) -> Result<()> {
    match arguments.command {
        Command::Serve(serve) => {
            config::log_to_stderr(serve.log_level);
            self::serve(&serve)
        }
    }
}

fn serve(serve: &Serve) -> Result<()> {
    confine::close_inherited_descriptors()?;
    confine::clear_umask();
    keep_small()?;
    let boot = BootId::of_this_boot();
    let nonce = config::take_nonce()?;
    let driver = Dialled::dial(&serve.socket)?;
    let descriptors = match serve.isolation() {
        Isolation::ByTheRuntime => confine::in_given_namespaces()?,
        Isolation::Own => confine::in_own_namespaces()?,
    };
    let descriptor_limit = confine::raise_descriptor_limit()?;
    confine::drop_privileges()?;

    let (assignment, driver) = driver.receive_assignment(nonce)?;
    let name = assignment.volume_name.clone();
    let threads = assignment.threads.unwrap_or(serve.threads);
    let started = Serving::start(assignment, boot, (descriptors, descriptor_limit), threads);
    let (session, serving) = match started {
        Ok(started) => started,
        Err(error) => {
            driver.failed(&error);
            return Err(error);
        }
    };
    driver.ready(filesystem::MAX_WRITE_BYTES)?;
    tracing::info!(volume = name, threads, "serving");

    let ended = session.run().map_err(|source| Error::Session { source });
    serving.end();
    ended?;
    tracing::info!(volume = name, "unmounted");
    Ok(())
}

/// Of the buffers for requests, 16 MiB for each event loop, only what is used may
/// take memory. The largest request and the largest answer come from the heap.
fn keep_small() -> Result<()> {
    const LARGE: u32 = 4 * filesystem::MAX_WRITE_BYTES;
    linux::memory::map_allocations_from(LARGE)
        .and_then(|()| linux::memory::refuse_huge_pages())
        .map_err(|source| Error::Kernel { step: "memory", source })
}

/// What outlives the session.
struct Serving {
    quota: Arc<Quota>,
    gate: Arc<Gate>,
    usage_file: UsageFile,
}

impl Serving {
    /// Reads and answers FUSE_INIT; afterwards the process can do nothing but serve.
    fn start(
        assignment: Assignment,
        boot: Option<BootId>,
        (descriptors, descriptor_limit): (DescriptorDir, u64),
        threads: usize,
    ) -> Result<(Session<VolumeFilesystem>, Self)> {
        let usage_file = UsageFile::new(assignment.usage_file, boot);
        let found = usage_file.read();
        let is_counted = found.is_some();
        usage_file.forget().map_err(step("usage file", "truncate"))?;
        let quota = Arc::new(Quota::new(assignment.limits, found, threads));
        let gate = Arc::new(Gate::new(!is_counted).map_err(step("threads", "eventfd"))?);
        let limits = NodeLimits {
            descriptors: descriptor_limit,
            known: assignment.known_inode_limit,
            event_loops: threads,
        };
        let volume = Arc::new(Volume::open(assignment.volume, descriptors, limits, Arc::clone(&quota))?);
        let notified = assignment.fuse_device.try_clone().map_err(|source| Error::Kernel {
            step: "notifications",
            source: linux::Error::new("duplicate", "the FUSE connection", source),
        })?;
        let metrics = Arc::new(Metrics::default());
        let filesystem = VolumeFilesystem::new(Arc::clone(&volume), Arc::clone(&gate), Arc::clone(&metrics));
        let session = open_session(filesystem, assignment.fuse_device, threads)?;
        lock_in()?;
        let mount_points = Arc::new(MountPoints::default());
        let subject = Subject {
            volume: Arc::clone(&volume),
            gate: Arc::clone(&gate),
            quota: Arc::clone(&quota),
            metrics,
            mount_points: Arc::clone(&mount_points),
        };
        control::start(assignment.listeners, subject)
            .map_err(|source| Error::Thread { name: "control", source })?;
        pruner::start(Arc::clone(&volume), notified, mount_points)
            .map_err(|source| Error::Thread { name: "pruner", source })?;
        if !is_counted {
            start_counting(volume, Arc::clone(&quota), Arc::clone(&gate))?;
        }
        Ok((session, Self { quota, gate, usage_file }))
    }

    /// Nobody asks for anything any more. Unless a change is still being made,
    /// the next daemon need not count.
    fn end(self) {
        self.gate.shut(Reason::Pause);
        if self.quota.usage().counting || !self.gate.is_still() {
            return;
        }
        if let Err(error) = self.usage_file.keep(&self.quota.at_the_end()) {
            tracing::warn!(%error, "usage file: the next daemon will count anew");
        }
    }
}

/// In a thread of its own: reads are served meanwhile.
fn start_counting(volume: Arc<Volume>, quota: Arc<Quota>, gate: Arc<Gate>) -> Result<()> {
    let counting = move || {
        match volume.count() {
            Ok(found) => quota.set_counted(found),
            Err(error) => {
                // Rather full than without a limit; removing makes no room either.
                tracing::error!(%error, "the volume cannot be counted: it takes no more data");
                let counted = Counted { bytes: u64::MAX, inodes: u64::MAX };
                quota.set_counted(Use { counted, unsettled: Vec::new() });
            }
        }
        gate.open(Reason::Counting);
    };
    std::thread::Builder::new()
        .name("count".to_owned())
        .spawn(counting)
        .map(drop)
        .map_err(|source| Error::Thread { name: "count", source })
}

fn open_session(
    filesystem: VolumeFilesystem,
    fuse_device: OwnedFd,
    threads: usize,
) -> Result<Session<VolumeFilesystem>> {
    let mut config = fuser::Config::default();
    config.acl = SessionACL::All;
    config.n_threads = Some(threads);
    Session::from_fd(filesystem, fuse_device, SessionACL::All, config)
        .map_err(|source| Error::Handshake { source })
}

fn step(step: &'static str, call: &'static str) -> impl Fn(rustix::io::Errno) -> Error {
    move |errno| Error::Kernel { step, source: linux::Error::new(call, "", errno) }
}

/// From the answer on the volume has users: only its unmount ends the process
/// (or SIGKILL at the end of a grace period), and nothing but serving is left
/// to it. Both are inherited by the event loops.
fn lock_in() -> Result<()> {
    let signals: SigSet = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP].into_iter().collect();
    signals.thread_block().map_err(|errno| Error::Signals { source: errno.into() })?;
    seccomp::install()?;
    confine::drop_the_last()
}
