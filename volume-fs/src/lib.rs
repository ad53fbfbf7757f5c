//! The file system process of one volume: a POSIX file system over a directory
//! that arrives as a descriptor of a detached mount, served on a FUSE
//! connection that arrives as a descriptor too.
//!
//! Start to end: [`handover`] dials the driver, [`confine`] gives up what the
//! process will not need, `handover` receives the two descriptors, fuser
//! answers FUSE_INIT, the driver is told, the socket is closed, [`seccomp`]
//! closes the door, and the event loops run until the unmount.
//!
//! In the middle: `filesystem` speaks fuser, `volume` is the file system,
//! `nodes` knows which file a node id is, `directory` and `handles` are what
//! is open.
//!
//! Invariant: no path of the host is ever used; every name is one component
//! below a descriptor inside the volume, and no symbolic link is followed.

mod attributes;
pub mod config;
pub mod confine;
mod directory;
mod errno;
mod error;
mod filesystem;
mod handles;
pub mod handover;
mod nodes;
pub mod seccomp;
mod volume;

use fuser::{Session, SessionACL};
use nix::sys::signal::{SigSet, Signal};

pub use crate::error::{Error, Result};

use crate::config::{Arguments, Command, Serve};
use crate::confine::Isolation;
use crate::filesystem::VolumeFilesystem;
use crate::handover::Dialled;
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
    let started = Volume::open(assignment.volume, descriptors, descriptor_limit)
        .and_then(|volume| open_session(volume, assignment.fuse_device, threads))
        .and_then(|session| lock_in().map(|()| session));
    let session = match started {
        Ok(session) => session,
        Err(error) => {
            driver.failed(&error);
            return Err(error);
        }
    };
    driver.ready(filesystem::MAX_WRITE_BYTES)?;
    tracing::info!(volume = name, threads, "serving");

    session.run().map_err(|source| Error::Session { source })?;
    tracing::info!(volume = name, "unmounted");
    Ok(())
}

/// Reads and answers FUSE_INIT.
fn open_session(
    volume: Volume,
    fuse_device: std::os::fd::OwnedFd,
    threads: usize,
) -> Result<Session<VolumeFilesystem>> {
    let mut config = fuser::Config::default();
    config.acl = SessionACL::All;
    config.n_threads = Some(threads);
    Session::from_fd(VolumeFilesystem::new(volume), fuse_device, SessionACL::All, config)
        .map_err(|source| Error::Handshake { source })
}

/// From the answer on the volume has users: only its unmount ends the process
/// (or SIGKILL at the end of a grace period), and nothing but serving is left
/// to it. Both are inherited by the event loops.
fn lock_in() -> Result<()> {
    let signals: SigSet = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP].into_iter().collect();
    signals.thread_block().map_err(|errno| Error::Signals { source: errno.into() })?;
    seccomp::install()
}
