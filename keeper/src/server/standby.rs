//! Takeovers while no driver runs: a volume whose daemon has ended goes to a spare daemon.
//!
//! A spare daemon is a process that waits for a volume. The driver gives the keeper its own end of the
//! daemon's socket, and what to send for each volume.
//!
//! Invariant: no two daemons have one connection. The keeper acts only after the pidfd of the volume's
//! daemon shows its end, only while no driver attends, and only after all requests that a driver sent
//! before its own end. A driver that starts a daemon asks for a socket to the keeper first, after which
//! the keeper does not act for the volume until the driver puts another pidfd.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::SystemTime;

use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;

use super::Server;
use crate::descriptors;
use crate::packets;
use crate::wire::standby::{Assignment, Beside, LaunchKey, Takeover};
use crate::wire::{Refusal, Role, VolumeKey};

pub(super) const MOST_SPARES: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Standby {
    /// The volumes whose daemon's pidfd is held.
    armed: BTreeMap<VolumeKey, Armed>,
    spares: VecDeque<Spare>,
    /// By number: daemons that got a volume and have not answered. Without its socket, one would end.
    starting: BTreeMap<u64, Starting>,
}

#[derive(Debug, Clone, Copy)]
struct Armed {
    /// Of the pidfd.
    number: u64,
    has_ended: bool,
    /// Since a driver has put a pidfd.
    taken: Option<Taken>,
}

#[derive(Debug, Clone, Copy)]
struct Taken {
    launch: LaunchKey,
    count: u32,
    since: u64,
}

#[derive(Debug)]
struct Spare {
    number: u64,
    launch: LaunchKey,
    socket: OwnedFd,
    pidfd: OwnedFd,
}

#[derive(Debug)]
struct Starting {
    volume: VolumeKey,
    socket: OwnedFd,
}

impl Standby {
    /// From the first volume above `after`.
    pub(super) fn takeovers_after(&self, after: Option<VolumeKey>) -> impl Iterator<Item = Takeover> {
        let above = move |volume: &VolumeKey| after.is_none_or(|after| *volume > after);
        let taken = self.armed.iter().filter(move |(volume, _)| above(volume));
        taken.filter_map(|(volume, armed)| {
            let Taken { launch, count, since } = armed.taken?;
            Some(Takeover { volume: *volume, launch, count, since })
        })
    }

    fn ended(&self) -> Vec<VolumeKey> {
        self.armed.iter().filter(|(_, armed)| armed.has_ended).map(|(volume, _)| *volume).collect()
    }
}

impl Server {
    /// Holds the pidfd of the volume's daemon. Returns whether it replaced another one.
    pub(super) fn arm(&mut self, volume: VolumeKey, pidfd: OwnedFd) -> Result<bool, Refusal> {
        self.watch_daemon(volume, pidfd, None)
    }

    fn watch_daemon(
        &mut self,
        volume: VolumeKey,
        pidfd: OwnedFd,
        taken: Option<Taken>,
    ) -> Result<bool, Refusal> {
        let number = self.new_number();
        if !self.watch(&pidfd, number, EventFlags::IN | EventFlags::ONESHOT) {
            return Err(Refusal::System);
        }
        self.unwatch_daemon(volume);
        self.standby.armed.insert(volume, Armed { number, has_ended: false, taken });
        Ok(self.held.put(volume, Role::Daemon, pidfd))
    }

    fn unwatch_daemon(&self, volume: VolumeKey) {
        if let Some(pidfd) = self.held.get(volume, Role::Daemon) {
            // Refused only if it is not registered.
            let _deleted = epoll::delete(&self.epoll, pidfd);
        }
    }

    /// From here on no spare daemon gets the volume. Returns whether one could have.
    pub(super) fn disarm(&mut self, volume: VolumeKey) -> bool {
        self.forget_standby(volume);
        self.held.forget(volume, Role::Daemon)
    }

    /// [`Self::disarm`], but what is held stays.
    pub(super) fn forget_standby(&mut self, volume: VolumeKey) {
        self.unwatch_daemon(volume);
        self.standby.armed.remove(&volume);
        self.end_starting(volume);
    }

    /// Its socket is of no more use.
    fn end_starting(&mut self, volume: VolumeKey) {
        let of_volume = |_: &u64, starting: &mut Starting| starting.volume == volume;
        for starting in self.standby.starting.extract_if(.., of_volume) {
            let _deleted = epoll::delete(&self.epoll, &starting.1.socket);
            self.held.close(starting.1.socket);
        }
    }

    /// Returns whether it replaced another one of the same launch.
    pub(super) fn put_spare(&mut self, launch: LaunchKey, socket: OwnedFd) -> Result<bool, Refusal> {
        let checked = descriptors::check_spare(socket.as_fd());
        let pidfd = match checked {
            Ok(pidfd) => pidfd,
            Err(refusal) => {
                self.held.close(socket);
                return Err(refusal);
            }
        };
        let has_replaced = self.forget_spare(launch);
        if self.standby.spares.len() >= MOST_SPARES {
            return Err(Refusal::Full);
        }
        let number = self.new_number();
        if !self.watch(&socket, number, EventFlags::IN | EventFlags::RDHUP) {
            return Err(Refusal::System);
        }
        self.standby.spares.push_back(Spare { number, launch, socket, pidfd });
        self.log.debug(format_args!("holds the socket of spare daemon {launch}"));
        Ok(has_replaced)
    }

    pub(super) fn forget_spare(&mut self, launch: LaunchKey) -> bool {
        let at = self.standby.spares.iter().position(|spare| spare.launch == launch);
        let found = at.and_then(|at| self.standby.spares.remove(at));
        found.is_some_and(|spare| {
            self.close_spare(spare);
            true
        })
    }

    /// Returns how many there were.
    pub(super) fn forget_spares(&mut self) -> usize {
        let spares = std::mem::take(&mut self.standby.spares);
        let count = spares.len();
        spares.into_iter().for_each(|spare| self.close_spare(spare));
        count
    }

    fn close_spare(&self, spare: Spare) {
        let _deleted = epoll::delete(&self.epoll, &spare.socket);
        self.held.close(spare.socket);
    }

    /// Handles an event of a daemon's pidfd or of a spare daemon's socket. False for any other number.
    pub(super) fn turn_of_standby(&mut self, number: u64) -> bool {
        if let Some(armed) = self.standby.armed.values_mut().find(|armed| armed.number == number) {
            armed.has_ended = true;
            return true;
        }
        if let Some(at) = self.standby.spares.iter().position(|spare| spare.number == number) {
            // It has ended, or said something without a request.
            if let Some(spare) = self.standby.spares.remove(at) {
                self.log.debug(format_args!("spare daemon {} waits no longer", spare.launch));
                self.close_spare(spare);
            }
            return true;
        }
        match self.standby.starting.remove(&number) {
            Some(Starting { volume, socket }) => {
                self.log.info(format_args!("volume {volume}: its new daemon has answered, or ended"));
                let _deleted = epoll::delete(&self.epoll, &socket);
                self.held.close(socket);
                true
            }
            None => false,
        }
    }

    /// Gives volumes whose daemons have ended to spare daemons, if no driver attends.
    pub(super) fn stand_in(&mut self) {
        if self.standby.spares.is_empty() || self.is_attended() || self.has_requests() {
            return;
        }
        if self.standby.armed.is_empty() {
            self.log.info(format_args!(
                "no driver and no volume: {} spare daemons end",
                self.standby.spares.len()
            ));
            self.forget_spares();
            return;
        }
        for volume in self.standby.ended() {
            self.give_to_spare(volume);
        }
    }

    fn is_attended(&self) -> bool {
        self.connections.values().any(|connection| connection.attends())
    }

    /// Whether a driver, which may have ended since, has sent something that was not read.
    fn has_requests(&self) -> bool {
        let waits = |socket: BorrowedFd<'_>| packets::is_readable(socket);
        (self.accepts_again.is_none() && waits(self.listener.as_fd()))
            || self.connections.values().any(|connection| waits(connection.socket()))
    }

    fn give_to_spare(&mut self, volume: VolumeKey) {
        let assignment = match self.assignment(volume) {
            Ok(assignment) => assignment,
            Err(reason) => {
                self.log.info(format_args!("volume {volume}: its daemon has ended, and {reason}"));
                self.disarm(volume);
                return;
            }
        };
        if self.standby.spares.is_empty() {
            return;
        }
        let socket = match self.new_daemon(volume) {
            Ok(socket) => socket,
            Err(e) => {
                return self.log.warn(format_args!("volume {volume}: a socket for a spare daemon: {e}"));
            }
        };
        while let Some(spare) = self.standby.spares.pop_front() {
            let launch = spare.launch;
            match self.send_assignment(volume, &assignment, &spare, socket.as_fd()) {
                Ok(()) => return self.has_given(volume, spare),
                Err(e) => {
                    self.log
                        .warn(format_args!("volume {volume}: spare daemon {launch} does not get it: {e}"));
                    self.close_spare(spare);
                }
            }
        }
    }

    /// What to send, if all of it is held and the volume has users.
    fn assignment(&self, volume: VolumeKey) -> Result<Assignment, &'static str> {
        let connection = self.held.get(volume, Role::Connection).ok_or("its connection is not held")?;
        if packets::is_aborted(connection) {
            return Err("it was unmounted");
        }
        let held = self.held.get(volume, Role::Assignment).ok_or("no assignment is held")?;
        let assignment = descriptors::read_assignment(held).map_err(Refusal::text)?;
        let is_held = |beside: &Beside| match beside {
            Beside::Held(role) => self.held.get(volume, *role).is_some(),
            Beside::KeeperSocket => true,
        };
        if assignment.beside().iter().all(is_held) { Ok(assignment) } else { Err("not all of it is held") }
    }

    fn send_assignment(
        &self,
        volume: VolumeKey,
        assignment: &Assignment,
        spare: &Spare,
        keeper: BorrowedFd<'_>,
    ) -> Result<(), Errno> {
        if packets::has_ended(&spare.pidfd) {
            return Err(Errno::PIPE);
        }
        let fds: Option<Vec<_>> = assignment
            .beside()
            .iter()
            .map(|beside| match beside {
                Beside::Held(role) => self.held.get(volume, *role),
                Beside::KeeperSocket => Some(keeper),
            })
            .collect();
        packets::send(&spare.socket, assignment.packet(), &fds.ok_or(Errno::BADF)?)
    }

    /// The spare daemon is the volume's daemon from now on.
    fn has_given(&mut self, volume: VolumeKey, spare: Spare) {
        let Spare { number, launch, socket, pidfd } = spare;
        self.end_starting(volume);
        self.standby.starting.insert(number, Starting { volume, socket });
        let before = self.standby.armed.get(&volume).and_then(|armed| armed.taken);
        let count = before.map_or(1, |taken| taken.count.saturating_add(1));
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let taken = Taken { launch, count, since: since.map_or(0, |since| since.as_secs()) };
        if let Err(refusal) = self.watch_daemon(volume, pidfd, Some(taken)) {
            // The end of the daemon before it must not be taken for its own.
            self.log.warn(format_args!("volume {volume}: its new daemon is not watched: {refusal}"));
            self.disarm(volume);
        }
        self.log.warn(format_args!(
            "volume {volume}: its daemon has ended, and no driver runs: spare daemon {launch} gets the volume"
        ));
    }
}
