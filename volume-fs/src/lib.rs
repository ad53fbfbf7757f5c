//! The FUSE side of a volume's daemon, independent of the storage: requests and answers, the
//! hand-over of a FUSE connection that is already mounted, confinement, the control socket and the
//! metrics. The storage is behind one trait, [`backend::Backend`], with its own types. A daemon is
//! a [`service::Service`], and its `main` calls [`run`].
//!
//! The order of a daemon's life: `handover` connects to the driver; `confine` drops unneeded
//! privileges; `handover` receives the descriptors; the backend is opened; fuser answers FUSE_INIT;
//! [`seccomp`] restricts the system calls; the driver gets the answer and its socket is closed; the
//! event loops run until the unmount.
//!
//! While it serves: `filesystem` uses fuser and calls the backend; `control` answers the driver and
//! reports the `metrics`; [`notifications`] make the kernel forget inodes, and [`gate`] holds
//! changes back, both for backends that want it.
//!
//! Invariant: no backend sees a type of FUSE's, and no path of the host is ever used.

pub mod backend;
pub mod config;
mod confine;
mod control;
pub mod descriptors;
mod error;
pub mod failure;
pub mod figures;
pub mod file;
mod filesystem;
pub mod gate;
mod handover;
mod metrics;
pub mod notifications;
pub mod request;
pub mod seccomp;
pub mod service;

/// Entry points of the fuzz targets in `fuzz/`.
#[cfg(any(test, fuzzing))]
pub mod fuzzing {
    pub use crate::control::fuzzing::control_requests;
    pub use crate::handover::fuzzing::hello_reply;
}

use std::os::fd::OwnedFd;
use std::sync::Arc;

use fuser::{Session, SessionACL};
use linux::credentials::CapabilitySet;
use nix::sys::signal::{SigSet, Signal};

pub use crate::error::{Error, Result};

use crate::backend::Backend;
use crate::config::{Arguments, Command, Serve};
use crate::confine::Isolation;
use crate::control::{Control, Subject};
use crate::filesystem::Adapter;
use crate::handover::{Assignment, Dialled};
use crate::metrics::Metrics;
use crate::notifications::{Kernel, MountPoints};
use crate::service::{Service, Terms};

/// Runs the command line. `Ok` once the volume is unmounted.
pub fn run<S: Service>(service: S, arguments: Arguments) -> Result<()> {
    match arguments.command {
        Command::Serve(serve) => {
            config::log_to_stderr(serve.log_level);
            self::serve(service, &serve)
        }
    }
}

fn serve<S: Service>(service: S, serve: &Serve) -> Result<()> {
    confine::close_inherited_descriptors()?;
    confine::clear_umask();
    keep_small()?;
    let nonce = config::take_nonce()?;
    let driver = Dialled::dial(&serve.socket)?;
    let descriptors = match serve.isolation() {
        Isolation::ByTheRuntime => confine::in_given_namespaces()?,
        Isolation::Own => confine::in_own_namespaces(S::NETWORK)?,
    };
    let descriptor_limit = confine::raise_descriptor_limit()?;
    confine::drop_privileges(S::CAPABILITIES)?;

    let (assignment, driver) = driver.receive_assignment(nonce, &service)?;
    let name = assignment.volume_name.clone();
    let terms = Terms {
        read_only: assignment.read_only,
        limits: assignment.limits,
        known_inode_limit: assignment.known_inode_limit,
        event_loops: assignment.threads.unwrap_or(serve.threads),
        descriptors,
        descriptor_limit,
    };
    let threads = terms.event_loops;
    let (session, backend) = match start(service, assignment, terms) {
        Ok(started) => started,
        Err(error) => {
            driver.failed(&error);
            return Err(error);
        }
    };
    driver.ready(filesystem::MAX_WRITE_BYTES)?;
    tracing::info!(volume = name, threads, "serving");

    let ended = session.run().map_err(|source| Error::Session { source });
    backend.end();
    ended?;
    tracing::info!(volume = name, "unmounted");
    Ok(())
}

/// The request buffers have 16 MiB for each event loop, but must take memory only for the used
/// part. The largest request and the largest answer are allocated on the heap.
fn keep_small() -> Result<()> {
    const LARGE: u32 = 4 * filesystem::MAX_WRITE_BYTES;
    linux::memory::map_allocations_from(LARGE)
        .and_then(|()| linux::memory::refuse_huge_pages())
        .map_err(|source| Error::Kernel { step: "memory", source })
}

type Started<B> = (Session<Adapter<B>>, Arc<B>);

/// Opens the volume, and reads and answers FUSE_INIT. Afterwards the process can only serve.
fn start<S: Service>(
    service: S,
    assignment: Assignment<S::Assigned>,
    terms: Terms,
) -> Result<Started<S::Backend>> {
    let threads = terms.event_loops;
    let Assignment { fuse_device, listeners, for_backend, .. } = assignment;
    let backend = service.open(for_backend, terms)?;
    let metrics = Arc::new(Metrics::default());
    let mount_points = Arc::new(MountPoints::default());
    let notified = fuse_device.try_clone().map_err(|source| Error::Kernel {
        step: "notifications",
        source: linux::Error::new("duplicate", "the FUSE connection", source),
    })?;
    let kernel = Kernel::new(notified, Arc::clone(&mount_points));
    let subject = Subject { backend: Arc::clone(&backend), metrics: Arc::clone(&metrics), mount_points };
    let control = Control::new(listeners, subject).map_err(|errno| Error::Kernel {
        step: "control socket",
        source: linux::Error::new("eventfd", "", errno),
    })?;
    let session = open_session(Adapter::new(Arc::clone(&backend), metrics), fuse_device, threads)?;
    lock_in(S::CAPABILITIES, S::SYSTEM_CALLS)?;
    control.start().map_err(|source| Error::Thread { name: "control", source })?;
    Arc::clone(&backend).start(kernel)?;
    Ok((session, backend))
}

fn open_session<B: Backend>(
    filesystem: Adapter<B>,
    fuse_device: OwnedFd,
    threads: usize,
) -> Result<Session<Adapter<B>>> {
    let mut config = fuser::Config::default();
    config.acl = SessionACL::All;
    config.n_threads = Some(threads);
    Session::from_fd(filesystem, fuse_device, SessionACL::All, config)
        .map_err(|source| Error::Handshake { source })
}

/// Once FUSE_INIT is answered, the volume has users: only its unmount ends the process (or SIGKILL
/// after a grace period), and the process can only serve. The event loops inherit both
/// restrictions.
fn lock_in(capabilities: CapabilitySet, system_calls: &[libc::c_long]) -> Result<()> {
    let signals: SigSet = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP].into_iter().collect();
    signals.thread_block().map_err(|errno| Error::Signals { source: errno.into() })?;
    seccomp::install(system_calls)?;
    confine::drop_the_last(capabilities)
}
