//! Answers the driver's requests to a serving daemon (proto/proto/hawser/control/v1/control.proto),
//! and scrapers of metrics.
//!
//! One thread for both listeners and all connections. It waits only in poll(2), so that leases end
//! in time.

mod descriptors;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod listener;
mod pauses;
mod scrapes;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use keeper::daemon::Removed;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use prost::Message;
use proto::control::{
    Descriptors, Done, Pong, Reply, Request, Stats, Usage, Written, reply, request, written,
};
use proto::handover::Role;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::RecvFlags;

use self::listener::Listener;
use self::pauses::{Pauses, Who, refused};
use self::scrapes::Scrapes;
use crate::KEEPER_TIMEOUT;
use crate::backend::Backend;
use crate::config::RELEASE;
use crate::descriptors::check_packet_socket;
use crate::figures::{Figures, Limits};
use crate::file::NodeId;
use crate::metrics::{Gauges, Metrics};
use crate::notifications::MountPoints;

/// The driver's, and an administrator's with a tool. For a further connection, the oldest one that
/// has not paused the volume is closed.
const MOST_CONNECTIONS: usize = 8;
/// All mount points in a volume; other requests need less than a tenth.
const MOST_REQUEST_BYTES: usize = 64 << 10;
/// Files in one reply, which then has at most 25 KiB.
const MOST_WRITTEN: usize = 1000;
const STACK_BYTES: usize = 128 << 10;

/// Sockets that listen already.
#[derive(Debug)]
pub(crate) struct Listeners {
    /// SOCK_SEQPACKET.
    pub(crate) control: OwnedFd,
    /// SOCK_STREAM.
    pub(crate) metrics: OwnedFd,
}

/// The objects of requests.
#[derive(Debug)]
pub(crate) struct Subject<B> {
    pub(crate) backend: Arc<B>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) mount_points: Arc<MountPoints>,
}

/// The listeners and their connections.
pub(crate) struct Control<B> {
    listener: Listener,
    scrapes: Scrapes,
    subject: Subject<B>,
    pauses: Pauses<B>,
    connections: Vec<Connection>,
    next: Who,
    /// What a successor of this daemon needs; empty if none can follow.
    left: Vec<(Role, OwnedFd)>,
}

struct Connection {
    who: Who,
    fd: OwnedFd,
}

/// The result of poll(2).
#[derive(Default)]
struct Ready {
    /// A pause has begun or failed.
    paused: bool,
    dialled: bool,
    connections: Vec<Who>,
    /// In the order of [`Scrapes::fds`].
    scrapes: Vec<bool>,
}

impl<B: Backend> Control<B> {
    pub(crate) fn new(listeners: Listeners, subject: Subject<B>) -> rustix::io::Result<Self> {
        Ok(Self {
            listener: Listener::new(listeners.control),
            scrapes: Scrapes::new(listeners.metrics),
            pauses: Pauses::new(Arc::clone(&subject.backend))?,
            subject,
            connections: Vec::new(),
            next: 0,
            left: Vec::new(),
        })
    }

    /// Returns these descriptors to a driver that asks for them.
    pub(crate) fn leave(&mut self, left: Vec<(Role, OwnedFd)>) {
        self.left = left;
    }

    /// Answers on a separate thread until the process ends.
    pub(crate) fn start(mut self) -> std::io::Result<()> {
        let thread = std::thread::Builder::new().name("control".to_owned()).stack_size(STACK_BYTES);
        let answering = move || {
            loop {
                if let Err(errno) = self.turn() {
                    tracing::error!(error = %errno, "control socket: requests are no longer answered");
                    return;
                }
            }
        };
        thread.spawn(answering).map(drop)
    }

    /// Waits for events and handles them.
    fn turn(&mut self) -> rustix::io::Result<()> {
        let ready = self.wait()?;
        let now = Instant::now();
        if ready.paused {
            let answer = self.pauses.take_answer(now);
            self.send(answer, now);
        }
        let overdue = self.pauses.lease_ended(now);
        self.send(overdue, now);
        for who in ready.connections {
            self.receive(who, now);
        }
        if let Some(fd) = self.listener.turn(ready.dialled, now) {
            self.let_in(fd, now);
        }
        self.scrapes.turn(&ready.scrapes, now, || {
            let figures = self.subject.backend.figures();
            self.subject.metrics.render(&Gauges { figures, paused: self.pauses.total() })
        });
        Ok(())
    }

    fn wait(&self) -> rustix::io::Result<Ready> {
        let ends =
            [self.pauses.ends(), self.scrapes.ends(), self.listener.ends()].into_iter().flatten().min();
        let timeout = ends.map(|ends| {
            // Rounded up: not before the lease is over.
            let left = ends.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
            Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 })
        });
        let paused = self.pauses.event();
        let mut fds = vec![PollFd::new(&paused, interest_if(self.pauses.is_awaited())), self.listener.poll()];
        fds.extend(self.connections.iter().map(|one| PollFd::new(&one.fd, PollFlags::IN)));
        fds.extend(self.scrapes.fds());
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
        let happened: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let (connections, scrapes) = happened[2..].split_at(self.connections.len());
        let connections = self.connections.iter().zip(connections);
        Ok(Ready {
            paused: happened[0],
            dialled: happened[1],
            connections: connections.filter(|(_, ready)| **ready).map(|(one, _)| one.who).collect(),
            scrapes: scrapes.to_vec(),
        })
    }

    fn let_in(&mut self, fd: OwnedFd, now: Instant) {
        // In a pod's pid namespace, the driver's pid shows as 0, so only the user is checked.
        match getsockopt(&fd, PeerCredentials) {
            Ok(peer) if peer.uid() == 0 => {
                self.make_room(now);
                self.connections.push(Connection { who: self.next, fd });
                self.next += 1;
            }
            Ok(peer) => {
                tracing::warn!(uid = peer.uid(), "control socket: closed a connection of another user");
            }
            Err(error) => tracing::warn!(%error, "control socket: closed a connection without credentials"),
        }
    }

    fn make_room(&mut self, now: Instant) {
        if self.connections.len() < MOST_CONNECTIONS {
            return;
        }
        let mut idle = self.connections.iter().filter(|one| !self.pauses.is_of(one.who));
        if let Some(oldest) = idle.next().map(|one| one.who) {
            self.close(oldest, now);
        }
    }

    /// Reads one packet from a connection. Closes it at its end and after an invalid packet.
    fn receive(&mut self, who: Who, now: Instant) {
        let Some(connection) = self.connections.iter().find(|one| one.who == who) else { return };
        let mut packet = vec![0_u8; MOST_REQUEST_BYTES];
        // Without a buffer for descriptors: those that a packet carries are closed by the kernel.
        let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC | RecvFlags::PEEK;
        let asked = match rustix::net::recv(&connection.fd, &mut packet, flags) {
            Err(Errno::AGAIN | Errno::INTR) => return,
            Err(_) | Ok((_, 0)) => return self.close(who, now),
            Ok((_, length)) => match packet.get(..length).map(Request::decode) {
                Some(Ok(Request { kind: Some(asked) })) => Ok(asked),
                Some(Ok(Request { kind: None })) => Err("kind: not a request of this version".to_owned()),
                Some(Err(error)) => Err(format!("no Request: {error}")),
                None => Err(format!("{length} bytes are more than {MOST_REQUEST_BYTES}")),
            },
        };
        let answer = match asked {
            Ok(request::Kind::ReplaceKeeper(_)) => {
                let socket = descriptors::receive_one(&connection.fd);
                Some(socket.and_then(|socket| self.replace_keeper(socket)).unwrap_or_else(refused))
            }
            other => {
                // This thread alone reads, so the packet is still the first one.
                let taken = rustix::net::recv(&connection.fd, &mut packet[..1], RecvFlags::DONTWAIT);
                match (taken, other) {
                    (Err(_), _) => return self.close(who, now),
                    (Ok(_), Ok(asked)) => self.act(who, asked, now),
                    (Ok(_), Err(reason)) => Some(refused(reason)),
                }
            }
        };
        self.send(answer.map(|answer| (who, answer)), now);
    }

    fn replace_keeper(&self, socket: OwnedFd) -> Result<reply::Kind, String> {
        check_packet_socket(&socket)?;
        let keeper = Removed::new(socket, KEEPER_TIMEOUT).map_err(|error| linux::chain(&error))?;
        let given = self.subject.backend.replace_keeper(keeper)?;
        tracing::info!(given, "uses another keeper");
        Ok(reply::Kind::Done(Done {}))
    }

    fn act(&mut self, who: Who, asked: request::Kind, now: Instant) -> Option<reply::Kind> {
        Some(match asked {
            request::Kind::Ping(_) => {
                reply::Kind::Pong(Pong { version: proto::control::VERSION, release: RELEASE.to_owned() })
            }
            request::Kind::GetUsage(_) => reply::Kind::Usage(self.usage()),
            request::Kind::SetCapacity(wanted) => {
                let limits = Limits { bytes: wanted.capacity_bytes, inodes: wanted.inode_limit };
                match self.subject.backend.set_limits(limits) {
                    Ok(()) => reply::Kind::Done(Done {}),
                    Err(shrinks) => refused(shrinks.to_string()),
                }
            }
            request::Kind::Quiesce(wanted) => return self.pauses.quiesce(who, &wanted, now),
            request::Kind::Resume(_) => self.pauses.resume(who, now),
            request::Kind::GetStats(_) => reply::Kind::Stats(self.stats()),
            request::Kind::GetDescriptors(_) => {
                let roles = self.left.iter().map(|(role, _)| i32::from(*role)).collect();
                reply::Kind::Descriptors(Descriptors { roles })
            }
            request::Kind::GetWritten(wanted) => self.written(wanted.after).unwrap_or_else(refused),
            request::Kind::ReplaceKeeper(_) => refused("a descriptor that was not received".to_owned()),
            request::Kind::MountPoints(list) => {
                if self.subject.mount_points.answer(list.round, list.paths) {
                    reply::Kind::Done(Done {})
                } else {
                    refused(format!("round: {} does not wait for mount points", list.round))
                }
            }
        })
    }

    fn usage(&self) -> Usage {
        let Figures { usage: now, .. } = self.subject.backend.figures();
        Usage {
            used_bytes: now.used.bytes,
            capacity_bytes: now.limits.bytes,
            used_inodes: now.used.inodes,
            inode_limit: now.limits.inodes,
            counting: now.counting,
        }
    }

    fn written(&self, after: u64) -> Result<reply::Kind, String> {
        let files = self.subject.backend.written(NodeId(after), MOST_WRITTEN)?;
        let files = files.into_iter().map(|(NodeId(node), generation)| written::File { node, generation });
        Ok(reply::Kind::Written(Written { files: files.collect() }))
    }

    fn stats(&self) -> Stats {
        let Figures { known, .. } = self.subject.backend.figures();
        Stats {
            known_inodes: known.nodes as u64,
            known_inode_limit: known.limit as u64,
            removed_inodes: known.nameless as u64,
            asked_to_forget: known.asked_to_forget,
            refused: known.refused,
            mount_points_wanted: self.subject.mount_points.wanted_for().unwrap_or_default(),
        }
    }

    fn send(&mut self, answer: Option<(Who, reply::Kind)>, now: Instant) {
        let Some((who, kind)) = answer else { return };
        let Some(connection) = self.connections.iter().find(|one| one.who == who) else { return };
        let beside: Vec<BorrowedFd<'_>> = match &kind {
            reply::Kind::Descriptors(_) => self.left.iter().map(|(_, fd)| fd.as_fd()).collect(),
            _ => Vec::new(),
        };
        let packet = Reply { kind: Some(kind) }.encode_to_vec();
        // A client that does not read its answers is disconnected.
        if descriptors::send(&connection.fd, &packet, &beside).is_err() {
            self.close(who, now);
        }
    }

    fn close(&mut self, who: Who, now: Instant) {
        self.connections.retain(|one| one.who != who);
        self.pauses.left(who, now);
    }
}

fn interest_if(reads: bool) -> PollFlags {
    if reads { PollFlags::IN } else { PollFlags::empty() }
}
