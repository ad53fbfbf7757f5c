//! The FUSE side of a volume's daemon, independent of the storage: requests and answers, the
//! hand-over of a FUSE connection that is already mounted, confinement, the control socket and the
//! metrics. The storage is behind one trait, [`backend::Backend`], with its own types. A daemon is
//! a [`service::Service`], and its `main` calls [`run`].
//!
//! The order of a daemon's life: `handover` connects to the driver; `confine` drops unneeded
//! privileges; `handover` receives the descriptors; if an earlier daemon still serves, this one checks
//! what it got and waits for its end; the backend is opened; fuser answers FUSE_INIT;
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
mod connection;
mod control;
pub mod descriptors;
mod error;
mod event_loops;
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
pub mod state;

/// Entry points of the fuzz targets in `fuzz/`.
#[cfg(any(test, fuzzing))]
pub mod fuzzing {
    pub use crate::control::fuzzing::control_requests;
    pub use crate::handover::fuzzing::hello_reply;
}

use std::sync::Arc;
use std::time::Duration;

use fuser::Session;
use keeper::daemon::Removed;
use linux::credentials::CapabilitySet;
use nix::sys::signal::{SigSet, Signal};
use proto::handover::Ready;

pub use crate::error::{Error, Result};

use crate::backend::Backend;
use crate::config::{Arguments, Command, Serve};
use crate::confine::Isolation;
use crate::connection::Beginning;
use crate::control::{Control, Subject};
use crate::event_loops::EventLoops;
use crate::filesystem::{Adapter, Wanted};
use crate::handover::{Assignment, DriverConnection, PendingAnswer};
use crate::metrics::Metrics;
use crate::notifications::{Kernel, MountPoints};
use crate::service::{Process, Service, Succession, Terms};
use crate::state::StateTable;

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
    let driver = DriverConnection::dial(&serve.socket)?;
    let descriptors = match serve.isolation() {
        Isolation::ByTheRuntime => confine::in_given_namespaces()?,
        Isolation::Own => confine::in_own_namespaces(S::NETWORK)?,
    };
    let descriptor_limit = confine::raise_descriptor_limit()?;
    confine::leave_groups()?;
    confine::drop_privileges(S::CAPABILITIES)?;

    let Some((mut assignment, driver)) = driver.receive_assignment(nonce, serve.start(), &service)? else {
        return Ok(());
    };
    let name = assignment.volume_name.clone();
    let threads = assignment.threads.unwrap_or(serve.threads);
    let process = Process { event_loops: threads, descriptors, descriptor_limit };
    #[cfg(target_env = "gnu")]
    let is_followed = assignment.succession.is_some();
    let begun = match prepare(&mut assignment, threads, &driver) {
        Ok(true) => start(service, assignment, process),
        Ok(false) => {
            tracing::info!(volume = name, "the driver ended this daemon's wait: the earlier one serves");
            return Ok(());
        }
        Err(error) => Err(error),
    };
    let Started { session, backend, can_be_continued, needs_new_stage } = match begun {
        Ok(started) => started,
        Err(error) => {
            driver.failed(&error);
            return Err(error);
        }
    };
    driver.ready(Ready {
        max_write_bytes: filesystem::MAX_WRITE_BYTES,
        can_be_continued,
        needs_new_stage,
    })?;
    tracing::info!(volume = name, threads, "serving");

    linux::memory::forget_code().map_err(|source| Error::Kernel { step: "memory", source })?;
    // The event loops allocate their buffers now.
    #[cfg(target_env = "gnu")]
    if is_followed {
        ALLOCATOR.populate(filesystem::LARGEST_REQUEST_BYTES);
    }
    let ended = match session.run() {
        Err(source) if !is_end(&source) => Err(Error::Session { source }),
        _ => Ok(()),
    };
    backend.end();
    ended?;
    tracing::info!(volume = name, "unmounted");
    Ok(())
}

/// Whether the error says that the connection has ended. fuser knows only ENODEV. Reading a request
/// while the connection ends returns ECONNABORTED (fuse_dev_do_read of fs/fuse/dev.c).
fn is_end(error: &std::io::Error) -> bool {
    error.raw_os_error() == Some(libc::ECONNABORTED)
}

/// If an earlier daemon still serves: checks that this one can follow it, without changing anything, and
/// waits until the earlier one has ended. False if this daemon is not wanted.
fn prepare<T>(assignment: &mut Assignment<T>, threads: usize, driver: &PendingAnswer) -> Result<bool> {
    let Some(succession) = assignment.succession.as_mut().filter(|given| given.keeper.is_none()) else {
        return Ok(true);
    };
    let wanted = Wanted::of(assignment.terms.data_path, assignment.terms.writeback_cache);
    connection::check(wanted, &StateTable::open(&succession.state_table)?, threads)?;
    succession.keeper = driver.wait_for_proceed()?;
    Ok(succession.keeper.is_some())
}

/// A kill while the kernel copies a request to a buffer whose pages are not present would answer the
/// request with EIO (fuse_dev_do_read): a killed process gets no more pages. So in a daemon that
/// another one can follow, the part of each event loop's buffer that a request can fill is present
/// from the start.
#[cfg(target_env = "gnu")]
#[global_allocator]
static ALLOCATOR: linux::memory::Populating = linux::memory::Populating::new(16 << 20);

/// The request buffers have 16 MiB for each event loop, but must take memory only for the part that
/// a request can fill. The largest request and the largest answer are allocated on the heap.
fn keep_small() -> Result<()> {
    const LARGE: u32 = 4 * filesystem::MAX_WRITE_BYTES;
    linux::memory::map_allocations_from(LARGE)
        .and_then(|()| linux::memory::refuse_huge_pages())
        .map_err(|source| Error::Kernel { step: "memory", source })
}

/// Most that a request waits for the keeper, which waits for nothing itself.
const KEEPER_TIMEOUT: Duration = Duration::from_secs(2);

/// A volume that can be served.
struct Started<B: Backend> {
    session: Session<Adapter<B>>,
    backend: Arc<B>,
    can_be_continued: bool,
    needs_new_stage: Vec<String>,
}

/// Opens the volume, and reads and answers FUSE_INIT, unless an earlier daemon has done so.
/// Afterwards the process can only serve.
fn start<S: Service>(
    service: S,
    assignment: Assignment<S::Storage>,
    process: Process,
) -> Result<Started<S::Backend>> {
    let Assignment { fuse_device, terms: volume, listeners, storage, succession, .. } = assignment;
    let (threads, wanted) = (process.event_loops, Wanted::of(volume.data_path, volume.writeback_cache));
    let continues = succession.as_ref().is_some_and(|succession| succession.continues);
    let (table, succession, left) = match succession {
        Some(handover::Succession { state_table, keeper, continues, left }) => {
            let table = StateTable::open(state_table)?;
            if continues {
                // Before anything is changed.
                table.check()?;
            }
            let (state, version) = (table.region(), table.version());
            let keeper = keeper.ok_or_else(|| Error::Proceed { reason: "not received".to_owned() })?;
            let removed = Removed::new(keeper, KEEPER_TIMEOUT).map_err(|source| Error::Keeper { source })?;
            (Some(table), Some(Succession { state, version, removed, continues }), left)
        }
        None => (None, None, Vec::new()),
    };
    let backend = service.open(storage, Terms { volume, process, succession })?;
    let metrics = Arc::new(Metrics::default());
    let mount_points = Arc::new(MountPoints::default());
    // Beside the session's own: for notifications, and to see whether requests wait.
    let second = fuse_device.try_clone().map_err(|source| Error::Kernel {
        step: "second descriptor",
        source: linux::Error::new("duplicate", "the FUSE connection", source),
    })?;
    let second = Arc::new(second);
    let kernel = Kernel::new(Arc::clone(&second), Arc::clone(&mount_points));
    let subject = Subject { backend: Arc::clone(&backend), metrics: Arc::clone(&metrics), mount_points };
    let mut control = Control::new(listeners, subject).map_err(|errno| Error::Kernel {
        step: "control socket",
        source: linux::Error::new("eventfd", "", errno),
    })?;
    let adapter = Adapter::new(wanted, Arc::clone(&backend), metrics, EventLoops::new(second));
    let beginning = match &table {
        Some(table) if continues => Beginning::Continued(table),
        table => Beginning::New(table.as_ref()),
    };
    let opened = connection::open(adapter, wanted, &fuse_device, threads, beginning)?;
    let can_be_continued = opened.has_resend && table.is_some();
    if can_be_continued {
        control.leave(left);
    }
    lock_in(S::CAPABILITIES, S::SYSTEM_CALLS)?;
    control.start().map_err(|source| Error::Thread { name: "control", source })?;
    Arc::clone(&backend).start(kernel)?;
    if continues {
        // Before the event loops begin to read, so that these requests come first.
        connection::resend(&fuse_device)?;
    }
    let needs_new_stage = opened.needs_new_stage;
    Ok(Started { session: opened.session, backend, can_be_continued, needs_new_stage })
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
