//! One container of the pod: its process, its output and its log.

use std::os::fd::OwnedFd;

use linux::cgroup::Cgroup;
use linux::process;

use super::attach::Attachments;
use super::error::Result;
use super::log::{self, LogFile, Stream};
use super::note;
use super::outcome::Starting;
use super::protocol::ShimStatus;
use super::terminal::ShimStreams;
use crate::error::chain;

/// The largest pipe of an unprivileged process (/proc/sys/fs/pipe-max-size), and what arrives
/// meanwhile.
const MAX_PIPE_BYTES: usize = 2 << 20;

#[derive(Debug)]
pub(super) struct Container {
    /// `None` once it has ended.
    pub(super) pidfd: Option<OwnedFd>,
    pub(super) cgroup: Cgroup,
    /// `None` once it has ended.
    pub(super) log: Option<LogFile>,
    pub(super) streams: Vec<Stream>,
    /// Its stdin and its terminal.
    pub(super) ours: ShimStreams,
    pub(super) starting: Option<Starting>,
    pub(super) status: ShimStatus,
}

impl Container {
    /// Signals that came before its program ran.
    pub(super) fn send(&self, signals: &[i32]) {
        let Some(pidfd) = &self.pidfd else { return };
        for signal in signals {
            if let Err(error) = process::signal_pidfd(pidfd, *signal) {
                note(&chain(&error));
            }
        }
    }

    pub(super) fn pump(&mut self, id: &str, clients: &mut Attachments) {
        let Some(log) = &mut self.log else { return };
        self.streams.retain_mut(|stream| {
            let name = stream.name();
            let most = log::TURN_BYTES.min(clients.room(id, name));
            stream.pump(log, most, |bytes| clients.give(id, name, bytes))
        });
    }

    /// Reads the remaining output of an ended container. Its processes may have passed the pipe's
    /// write end to another container, which could write to it without end.
    pub(super) fn drain(&mut self, id: &str, clients: &mut Attachments) {
        let Some(log) = &mut self.log else { return };
        for mut stream in self.streams.drain(..) {
            let name = stream.name();
            if stream.pump(log, MAX_PIPE_BYTES, |bytes| clients.give(id, name, bytes)) {
                stream.finish(log);
            }
        }
    }

    /// Once its program runs, or has ended.
    pub(super) fn take_terminal(&mut self) -> Result<()> {
        self.streams.extend(self.ours.take_terminal()?);
        Ok(())
    }

    /// Instead of its pipes.
    pub(super) fn connect_terminal(&mut self, terminal: OwnedFd) -> Result<()> {
        self.streams = vec![self.ours.connect_terminal(terminal)?];
        Ok(())
    }

    /// A pod may have thousands of ended containers: none keeps a descriptor.
    pub(super) fn close_descriptors(&mut self) {
        self.pidfd = None;
        self.log = None;
        self.ours.close();
    }
}
