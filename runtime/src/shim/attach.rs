//! Clients of running containers: they get what a container writes, beside its log, and write to its stdin.
//!
//! A client that is slower than the container holds the container's output up, as a slow terminal does. One
//! that takes less than [`LEAST_BYTES`] in [`PACE`] meanwhile is given up, so that the container goes on.
//!
//! A client whose stdin ends is detached, unless the container has `stdin_once` and no terminal: then the
//! container's stdin ends, and the client still gets the output. containerd does the same.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};
use rustix::fs::OFlags;

use super::error::{Result, ShimError};
use super::protocol::{Attach, Message};
use super::relay::{Relay, has_gone};
use super::{Caller, Shim};

/// At the same time, of all containers of the pod.
const MOST_ATTACHED: usize = 128;
/// Of one client, in this process.
const MOST_DESCRIPTORS: u64 = 4;
/// Of one stream, that a client has not taken. Then the container's output waits.
const MOST_WAITING: usize = 256 << 10;
/// What a client must take for which output waits, within [`PACE`].
const LEAST_BYTES: usize = 32 << 10;
const PACE: Duration = Duration::from_secs(2);

/// All clients of the pod's containers.
#[derive(Debug, Default)]
pub(super) struct Attachments(BTreeMap<String, Attachment>);

#[derive(Debug)]
struct Attachment {
    container: String,
    /// The connection that learns its end.
    client: u64,
    /// `None`: the client sends nothing, or nothing more is passed on.
    stdin: Option<Relay>,
    outlets: Vec<Outlet>,
    has_outputs: bool,
    /// It gets no more output: it ends once it has what waits.
    is_last: bool,
    /// Some output of the container's end found no room.
    has_lost: bool,
    /// Until then it must have taken [`LEAST_BYTES`].
    until: Option<Instant>,
    /// Since that was decided.
    taken: usize,
}

/// One stream of a client.
#[derive(Debug)]
struct Outlet {
    name: &'static str,
    socket: File,
    waiting: Vec<u8>,
}

impl Attachments {
    /// What to wait for.
    pub(super) fn interest(&self) -> impl Iterator<Item = (&str, Vec<PollFd<'_>>)> {
        self.0.iter().map(|(id, attachment)| {
            let mut fds: Vec<PollFd<'_>> = attachment.stdin.iter().flat_map(Relay::interest).collect();
            fds.extend(attachment.outlets.iter().map(Outlet::interest));
            (id.as_str(), fds)
        })
    }

    /// How much of a container's stream its clients have room for.
    pub(super) fn room(&self, container: &str, stream: &str) -> usize {
        let outlets = self.takers(container).flat_map(|attachment| &attachment.outlets);
        let rooms = outlets.filter(|outlet| outlet.name == stream).map(Outlet::room);
        rooms.min().unwrap_or(usize::MAX)
    }

    fn takers(&self, container: &str) -> impl Iterator<Item = &Attachment> {
        self.0.values().filter(move |attachment| attachment.container == container && !attachment.is_last)
    }

    /// Passes on what a container has written. Clients that have gone are found later.
    pub(super) fn give(&mut self, container: &str, stream: &str, bytes: &[u8]) {
        for attachment in self.0.values_mut().filter(|a| a.container == container && !a.is_last) {
            for outlet in attachment.outlets.iter_mut().filter(|outlet| outlet.name == stream) {
                // Only at the container's end, whose output waits for none.
                if outlet.room() == 0 {
                    attachment.has_lost = true;
                    continue;
                }
                outlet.waiting.extend_from_slice(bytes);
            }
            attachment.flush();
            attachment.keep_pace();
        }
    }

    /// When [`Shim::expire_attachments`] has something to do.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.0.values().filter_map(|attachment| attachment.until).min()
    }

    fn of(&self, container: &str) -> Vec<String> {
        let of_container = self.0.iter().filter(|(_, attachment)| attachment.container == container);
        of_container.map(|(id, _)| id.clone()).collect()
    }
}

impl Attachment {
    fn flush(&mut self) {
        let taken = &mut self.taken;
        self.outlets.retain_mut(|outlet| match outlet.flush() {
            Some(length) => {
                *taken += length;
                true
            }
            None => false,
        });
    }

    /// Starts or ends the time in which the client must take something.
    fn keep_pace(&mut self) {
        let is_waited_for = self.outlets.iter().any(|outlet| outlet.room() == 0)
            || (self.is_last && !self.has_all())
            || self.has_gone();
        match (is_waited_for, self.until) {
            (true, None) => (self.until, self.taken) = (Some(Instant::now() + PACE), 0),
            (false, Some(_)) => self.until = None,
            _ => {}
        }
    }

    fn has_all(&self) -> bool {
        self.outlets.iter().all(|outlet| outlet.waiting.is_empty())
    }

    /// Its outputs were closed. Its input may still have to be passed on.
    fn has_gone(&self) -> bool {
        self.has_outputs && self.outlets.is_empty()
    }

    fn is_over(&self) -> bool {
        self.stdin.is_none() && (self.outlets.is_empty() || (self.is_last && self.has_all()))
    }
}

impl Outlet {
    fn new(name: &'static str, socket: OwnedFd) -> Result<Self> {
        let failed = |e: rustix::io::Errno| ShimError::Pipe { name, source: e.into() };
        let flags = rustix::fs::fcntl_getfl(&socket).map_err(failed)?;
        rustix::fs::fcntl_setfl(&socket, flags | OFlags::NONBLOCK).map_err(failed)?;
        Ok(Self { name, socket: socket.into(), waiting: Vec::new() })
    }

    fn interest(&self) -> PollFd<'_> {
        let mut interest = PollFlags::empty();
        interest.set(PollFlags::POLLOUT, !self.waiting.is_empty());
        PollFd::new(self.socket.as_fd(), interest)
    }

    fn room(&self) -> usize {
        MOST_WAITING.saturating_sub(self.waiting.len())
    }

    /// How many bytes the client took. `None`: it has gone.
    fn flush(&mut self) -> Option<usize> {
        let mut taken = 0;
        while taken < self.waiting.len() {
            match self.socket.write(&self.waiting[taken..]) {
                Ok(length) => taken += length,
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => return None,
            }
        }
        self.waiting.drain(..taken);
        (!has_gone(self.socket.as_fd())).then_some(taken)
    }
}

impl Shim {
    pub(super) fn attach(&mut self, caller: Caller, attach: Attach, sockets: Vec<OwnedFd>) -> Result<()> {
        let Attach { attach: id, container: container_id, stdin, stdout, stderr } = attach;
        let most = usize::try_from(self.descriptor_limit / 4 / MOST_DESCRIPTORS).unwrap_or(usize::MAX);
        let most = most.min(MOST_ATTACHED);
        if self.attachments.0.len() >= most {
            self.detach_gone();
        }
        if self.attachments.0.len() >= most {
            return Err(ShimError::TooManyAttached { most });
        }
        if self.attachments.0.contains_key(&id) {
            return Err(ShimError::StartedBefore);
        }
        let container = self.containers.get(&container_id).ok_or(ShimError::NoContainer)?;
        if container.pidfd.is_none() || container.starting.is_some() {
            return Err(ShimError::NotRunning);
        }
        let (found, wanted) = (sockets.len(), [stdin, stdout, stderr].into_iter().filter(|w| *w).count());
        if found != wanted {
            return Err(ShimError::WrongDescriptors { found, wanted });
        }
        let mut sockets = sockets.into_iter();
        let mut next = |is_wanted: bool| if is_wanted { sockets.next() } else { None };
        let stdin = match next(stdin) {
            Some(socket) => container.ours.input_from(socket)?,
            None => None,
        };
        let mut outlets = Vec::new();
        for (name, is_wanted) in [("stdout", stdout), ("stderr", stderr)] {
            if let Some(socket) = next(is_wanted) {
                outlets.push(Outlet::new(name, socket)?);
            }
        }
        let (client, has_outputs) = (caller.client, !outlets.is_empty());
        let (is_last, has_lost, until, taken) = (false, false, None, 0);
        let attachment = Attachment {
            container: container_id,
            client,
            stdin,
            outlets,
            has_outputs,
            is_last,
            has_lost,
            until,
            taken,
        };
        self.attachments.0.insert(id.clone(), attachment);
        // Without outputs it may be over at once.
        self.settle_attachment(&id);
        Ok(())
    }

    /// Nothing, if it has no terminal.
    pub(super) fn resize_container(&self, id: &str, columns: u16, rows: u16) -> Result<()> {
        let container = self.containers.get(id).ok_or(ShimError::NoContainer)?;
        match container.ours.terminal() {
            Some(terminal) => Ok(linux::terminal::set_size(terminal, columns, rows)?),
            None => Ok(()),
        }
    }

    /// Moves what can be moved.
    pub(super) fn serve_attachment(&mut self, id: &str) {
        let Some(attachment) = self.attachments.0.get_mut(id) else { return };
        attachment.flush();
        let mut stdin_has_ended = false;
        if let Some(stdin) = &mut attachment.stdin
            && !stdin.step()
        {
            stdin_has_ended = stdin.has_ended();
            attachment.stdin = None;
        }
        if stdin_has_ended {
            let container = attachment.container.clone();
            if !self.close_stdin_if_once(&container)
                && let Some(attachment) = self.attachments.0.get_mut(id)
            {
                attachment.is_last = true;
            }
        }
        self.settle_attachment(id);
    }

    /// Ends attachments of stdin alone whose client has gone while the container did not read. Nothing else waits
    /// for that.
    fn detach_gone(&mut self) {
        let has_gone =
            |a: &Attachment| !a.has_outputs && a.stdin.as_ref().is_some_and(Relay::sender_has_gone);
        let gone: Vec<String> =
            self.attachments.0.iter().filter(|(_, a)| has_gone(a)).map(|(id, _)| id.clone()).collect();
        for id in gone {
            self.detach(&id, None);
        }
    }

    /// Ends what is over.
    fn settle_attachment(&mut self, id: &str) {
        let Some(attachment) = self.attachments.0.get_mut(id) else { return };
        attachment.keep_pace();
        if attachment.is_over() {
            let problem = "the container has ended, and the client was too slow for the rest of its output";
            let problem = attachment.has_lost.then(|| problem.to_owned());
            self.detach(id, problem);
        }
    }

    /// Gives clients up that take too little.
    pub(super) fn expire_attachments(&mut self) {
        let now = Instant::now();
        let is_late = |attachment: &Attachment| attachment.until.is_some_and(|until| until <= now);
        let late: Vec<String> =
            self.attachments.0.iter().filter(|(_, a)| is_late(a)).map(|(id, _)| id.clone()).collect();
        for id in late {
            let Some(attachment) = self.attachments.0.get_mut(&id) else { continue };
            // poll(2) reports room only once a large part of the socket's buffer is free.
            attachment.flush();
            if attachment.taken >= LEAST_BYTES {
                attachment.until = None;
                self.settle_attachment(&id);
                continue;
            }
            let problem = format!(
                "the client took less than {LEAST_BYTES} bytes in {} s while output waited for it: it gets no more",
                PACE.as_secs()
            );
            self.detach(&id, Some(problem));
        }
    }

    fn detach(&mut self, id: &str, problem: Option<String>) {
        let Some(attachment) = self.attachments.0.remove(id) else { return };
        if attachment.stdin.is_some() {
            self.close_stdin_if_once(&attachment.container);
        }
        let client = attachment.client;
        // Closes its sockets.
        drop(attachment);
        self.send(client, &Message::Detached { attach: id.to_owned(), problem });
    }

    /// The container has ended: its clients get what waits for them, and no more.
    pub(super) fn finish_attachments(&mut self, container: &str) {
        for id in self.attachments.of(container) {
            if let Some(attachment) = self.attachments.0.get_mut(&id) {
                attachment.stdin = None;
                attachment.is_last = true;
            }
            self.settle_attachment(&id);
        }
    }

    /// The first client's stdin has ended. Whether that ends the container's.
    fn close_stdin_if_once(&mut self, id: &str) -> bool {
        if !self.containers.get_mut(id).is_some_and(|container| container.ours.close_stdin_if_once()) {
            return false;
        }
        for attachment in self.attachments.0.values_mut().filter(|a| a.container == id) {
            attachment.stdin = None;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    static PIECE: [u8; 64 << 10] = [b'x'; 64 << 10];

    fn attached() -> (Attachments, UnixStream) {
        let (theirs, ours) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let attachment = Attachment {
            container: "c".to_owned(),
            client: 0,
            stdin: None,
            outlets: vec![Outlet::new("stdout", ours.into()).unwrap()],
            has_outputs: true,
            is_last: false,
            has_lost: false,
            until: None,
            taken: 0,
        };
        (Attachments(BTreeMap::from([("a".to_owned(), attachment)])), theirs)
    }

    #[test]
    fn output_waits_for_a_client_without_room_and_goes_on_when_it_reads() {
        let (mut clients, mut client) = attached();
        let mut given = 0;
        while clients.room("c", "stdout") > 0 {
            clients.give("c", "stdout", &PIECE);
            given += PIECE.len();
        }
        assert!(clients.deadline().is_some(), "it has a time to read");
        assert!(clients.0["a"].outlets[0].waiting.len() < MOST_WAITING + PIECE.len());
        // Nothing else waits for it.
        assert_eq!(clients.room("c", "stderr"), usize::MAX);
        assert_eq!(clients.room("d", "stdout"), usize::MAX);

        let mut read = 0;
        while read < given {
            match client.read(&mut [0; 1 << 20]) {
                Ok(length) => read += length,
                Err(e) => assert_eq!(e.kind(), ErrorKind::WouldBlock),
            }
            let attachment = clients.0.get_mut("a").unwrap();
            attachment.flush();
            attachment.keep_pace();
        }
        assert!(clients.0["a"].taken >= LEAST_BYTES, "it reads fast enough");
        assert_eq!((clients.room("c", "stdout"), clients.deadline()), (MOST_WAITING, None));
    }

    /// At a container's end, when its output waits for none.
    #[test]
    fn a_client_without_room_loses_the_rest_and_keeps_no_more_memory() {
        let (mut clients, _client) = attached();
        for _ in 0..100 {
            clients.give("c", "stdout", &PIECE);
        }
        let attachment = &clients.0["a"];
        assert!(attachment.has_lost);
        assert!(attachment.outlets[0].waiting.len() < MOST_WAITING + PIECE.len());
    }

    #[test]
    fn a_client_that_has_gone_is_over() {
        let (mut clients, client) = attached();
        drop(client);
        let attachment = clients.0.get_mut("a").unwrap();
        assert!(!attachment.is_over());
        attachment.flush();
        assert!(attachment.is_over());
    }
}
