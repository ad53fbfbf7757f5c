//! The shim: one single-threaded process for each pod. It starts the pod's containers, reads their
//! output, reaps them and keeps their exit status, also while no runtime runs.
//!
//! It is in the pod's ipc and uts namespaces and so keeps them alive. It stays in the host's mount,
//! network and pid namespaces.
//!
//! Invariant: one thread, one poll(2) loop; no code here waits for a runtime.

mod attach;
pub(crate) mod client;
mod container;
pub(crate) mod descriptors;
mod error;
mod exec;
mod holder;
pub(crate) mod log;
mod oci;
mod outcome;
pub(crate) mod protocol;
mod relay;
mod start;
mod terminal;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use linux::cgroup::{Cgroup, Hierarchies};
use linux::process::{self, Exit};
use linux::rootfs::EmptyMounts;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sched::CloneFlags;
use nix::sys::signal::Signal;
use nix::sys::signalfd::SignalFd;

use crate::disk::record::{self, Unflushed};
use crate::error::{Error, chain};
use attach::Attachments;
use client::{Client, Received};
use container::Container;
use error::{Result, ShimError};
use exec::{Execs, Waits};
use holder::Holder;
use log::LogFile;
use oci::OciRuntime;
use outcome::Outcome;
use protocol::{Answer, Call, Exited, Message, ShimConfig, container_dir, now};

/// How long no client is accepted after that has failed: this process, or the machine, has too many descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Longer waits after SIGKILL mean that the process hangs in the kernel.
const AFTER_KILL: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct Shim {
    dir: PathBuf,
    config: ShimConfig,
    listener: UnixListener,
    signals: SignalFd,
    /// For the containers' roots.
    mounts: EmptyMounts,
    clients: BTreeMap<u64, Client>,
    next_client: u64,
    containers: BTreeMap<String, Container>,
    /// Further programs in them.
    execs: Execs,
    /// Clients of them.
    attachments: Attachments,
    /// Until then no client is accepted.
    accept_again: Option<Instant>,
    /// RLIMIT_NOFILE of this process.
    descriptor_limit: u64,
    /// Process 1 of the pod's PID namespace.
    holder: Option<Holder>,
    ended: bool,
}

/// Whom to answer.
#[derive(Debug, Clone, Copy)]
struct Caller {
    client: u64,
    request: u64,
}

/// What poll(2) found ready.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Ready {
    Dialled,
    ChildEnded,
    Client(u64, PollFlags),
    Outcome(String),
    ExecOutcome(String),
    ExecStream(String),
    Attachment(String),
    Output(String),
}

/// Runs the shim of the sandbox in `dir`; its listening socket is stdin, and the [`EmptyMounts`] are
/// stdout. Returns after a Shutdown call.
pub(crate) fn run(dir: &Path) -> std::result::Result<(), Error> {
    // Not by the runtime: a process that is started in another directory is a copy of the whole runtime
    // (std's Command: fork(2) instead of posix_spawn(3)), and the larger that is, the longer it takes.
    std::env::set_current_dir("/").map_err(|e| Error::io("change to", Path::new("/"), e))?;
    let config: ShimConfig = record::load(&dir.join("shim.json"))?;
    process::new_session()?;
    process::become_subreaper()?;
    let mut namespaces = CloneFlags::empty();
    namespaces.set(CloneFlags::CLONE_NEWIPC, config.own_ipc);
    namespaces.set(CloneFlags::CLONE_NEWUTS, config.hostname.is_some());
    process::unshare(namespaces)?;
    if let Some(hostname) = &config.hostname {
        process::set_hostname(hostname)?;
    }
    // Signals to the runtime's session must not end the pod; children get the defaults back.
    let ignored = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];
    let signals = process::signal_descriptor(&[&[Signal::SIGCHLD], &ignored[..]].concat())?;
    let stdin = io::stdin().as_fd().try_clone_to_owned().map_err(|e| Error::io("clone stdin", dir, e))?;
    let stdout = io::stdout().as_fd().try_clone_to_owned().map_err(|e| Error::io("clone stdout", dir, e))?;
    let mounts = EmptyMounts::inherited(stdout);
    let listener = UnixListener::from(stdin);
    listener.set_nonblocking(true).map_err(|e| Error::io("listen", dir, e))?;
    let mut shim = Shim {
        dir: dir.to_owned(),
        config,
        listener,
        signals,
        mounts,
        clients: BTreeMap::new(),
        next_client: 0,
        containers: BTreeMap::new(),
        execs: Execs::default(),
        attachments: Attachments::default(),
        accept_again: None,
        descriptor_limit: process::descriptor_limit(),
        holder: None,
        ended: false,
    };
    while !shim.ended || shim.clients.values().any(Client::has_unsent) {
        for ready in shim.wait()? {
            shim.serve(ready);
        }
        shim.expire_attachments();
    }
    Ok(())
}

impl Shim {
    fn wait(&self) -> std::result::Result<Vec<Ready>, Error> {
        let mut what = vec![Ready::Dialled, Ready::ChildEnded];
        let accepts = self.accept_again.is_none_or(|again| again <= Instant::now());
        let mut fds = vec![
            PollFd::new(self.listener.as_fd(), if accepts { PollFlags::POLLIN } else { PollFlags::empty() }),
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
        ];
        for (id, client) in &self.clients {
            let mut interest = PollFlags::POLLIN;
            interest.set(PollFlags::POLLOUT, client.has_unsent());
            what.push(Ready::Client(*id, PollFlags::empty()));
            fds.push(PollFd::new(client.as_fd(), interest));
        }
        for (id, container) in &self.containers {
            if let Some(starting) = &container.starting {
                what.push(Ready::Outcome(id.clone()));
                fds.push(PollFd::new(starting.as_fd(), PollFlags::POLLIN));
            }
            // Output for which a client has no room waits.
            for stream in container.streams.iter().filter(|s| self.attachments.room(id, s.name()) > 0) {
                what.push(Ready::Output(id.clone()));
                fds.push(PollFd::new(stream.as_fd(), PollFlags::POLLIN));
            }
        }
        for (waits, polled) in self.execs.interest() {
            for fd in polled {
                what.push(match waits {
                    Waits::Outcome(id) => Ready::ExecOutcome(id.to_owned()),
                    Waits::Stream(id) => Ready::ExecStream(id.to_owned()),
                });
                fds.push(fd);
            }
        }
        for (id, polled) in self.attachments.interest() {
            for fd in polled {
                what.push(Ready::Attachment(id.to_owned()));
                fds.push(fd);
            }
        }
        let again = self.accept_again.filter(|_| !accepts);
        let until = again.into_iter().chain(self.attachments.deadline()).min();
        match nix::poll::poll(&mut fds, timeout(until)) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(e) => return Err(Error::io("poll", &self.dir, e.into())),
        }
        let mut ready: Vec<Ready> = Vec::new();
        for (what, fd) in what.into_iter().zip(&fds) {
            let found = fd.revents().unwrap_or(PollFlags::empty());
            if found.is_empty() {
                continue;
            }
            ready.push(if let Ready::Client(id, _) = what { Ready::Client(id, found) } else { what });
        }
        ready.dedup();
        Ok(ready)
    }

    fn serve(&mut self, ready: Ready) {
        match ready {
            Ready::Dialled => self.accept(),
            Ready::ChildEnded => self.reap(),
            Ready::Client(id, found) => self.talk(id, found),
            Ready::Outcome(id) => self.learn_outcome(&id),
            Ready::ExecOutcome(id) => self.learn_exec_outcome(&id),
            Ready::ExecStream(id) => self.relay(&id),
            Ready::Attachment(id) => self.serve_attachment(&id),
            Ready::Output(id) => {
                if let Some(container) = self.containers.get_mut(&id) {
                    container.pump(&id, &mut self.attachments);
                }
            }
        }
    }

    fn accept(&mut self) {
        loop {
            match self.listener.accept() {
                Ok((socket, _)) => {
                    self.accept_again = None;
                    if let Ok(client) = Client::new(socket) {
                        self.clients.insert(self.next_client, client);
                        self.next_client += 1;
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(e)
                    if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted) => {}
                // The client still waits, so the listener would be ready at once.
                Err(e) => {
                    if self.accept_again.replace(Instant::now() + ACCEPT_PAUSE).is_none() {
                        note(&format!("accept a client: {e}: trying again"));
                    }
                    return;
                }
            }
        }
    }

    fn talk(&mut self, id: u64, found: PollFlags) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        let mut alive = client.flush();
        let mut received = Vec::new();
        if found.intersects(PollFlags::POLLIN | PollFlags::POLLHUP | PollFlags::POLLERR) {
            alive &= client.read(&mut received).unwrap_or_else(|error| {
                note(&chain(&error));
                false
            });
        }
        for Received { request, descriptors } in received {
            // Disconnected since.
            if !self.clients.contains_key(&id) {
                break;
            }
            let caller = Caller { client: id, request: request.id };
            let answer = match descriptors {
                Some(descriptors) => self.call(caller, request.call, descriptors),
                None => Err(ShimError::NoRoomForDescriptors),
            };
            if let Some(answer) = answer.unwrap_or_else(|problem| Some(refused(&problem))) {
                self.send(id, &Message::Answer { id: request.id, answer });
            }
        }
        if !alive {
            self.disconnect(id);
        }
    }

    fn disconnect(&mut self, client: u64) {
        self.clients.remove(&client);
        self.kill_execs_of(client);
    }

    fn send(&mut self, client_id: u64, message: &Message) {
        let Some(client) = self.clients.get_mut(&client_id) else { return };
        if !client.send(message) {
            self.disconnect(client_id);
        }
    }

    /// `None`: the answer follows later.
    fn call(&mut self, caller: Caller, call: Call, mut descriptors: Vec<OwnedFd>) -> Result<Option<Answer>> {
        let most = call.most_descriptors();
        if descriptors.len() > most {
            return Err(ShimError::TooManyDescriptors { most });
        }
        match call {
            Call::Start(start) => return self.start(caller, start, descriptors.pop()),
            Call::Signal { container, signal } => self.signal(&container, signal)?,
            Call::ReopenLog { container } => self.reopen_log(&container)?,
            Call::Exec(exec) => return self.exec(caller, exec, descriptors).map(|()| None),
            Call::KillExec { exec } => self.kill_exec(&exec),
            Call::ResizeExec { exec, columns, rows } => self.resize_exec(&exec, columns, rows)?,
            Call::Attach(attach) => self.attach(caller, attach, descriptors)?,
            Call::ResizeContainer { container, columns, rows } => {
                self.resize_container(&container, columns, rows)?;
            }
            Call::HoldPids(asked) => return self.hold_pids(&asked).map(Some),
            Call::List => {
                return Ok(Some(Answer::Containers {
                    pid: std::process::id().cast_signed(),
                    receives_descriptors: true,
                    can_exec: true,
                    can_attach: true,
                    can_hold_pids: true,
                    containers: self
                        .containers
                        .iter()
                        .map(|(id, c)| (id.clone(), c.status.clone()))
                        .collect(),
                }));
            }
            Call::Shutdown => {
                if let Some((id, _)) = self.containers.iter().find(|(_, c)| c.status.exit.is_none()) {
                    return Err(ShimError::Running { container: id.clone() });
                }
                self.end_holder();
                self.ended = true;
            }
        }
        Ok(Some(Answer::Done))
    }

    /// The outcome pipe of a starting container is readable or closed.
    fn learn_outcome(&mut self, id: &str) {
        let Some(container) = self.containers.get_mut(id) else { return };
        let Some(starting) = &mut container.starting else { return };
        let outcome = match starting.read() {
            Outcome::Unknown => return,
            Outcome::Runs => container.take_terminal().inspect_err(|_| {
                if let Some(pidfd) = &container.pidfd {
                    let _has_ended = process::signal_pidfd(pidfd, libc::SIGKILL);
                }
            }),
            Outcome::Failed(problem) => Err(problem),
        };
        let Some(starting) = container.starting.take() else { return };
        let answer = match outcome {
            Ok(()) => {
                container.send(&starting.signals);
                let status = container.status.clone();
                self.save(id);
                Answer::Started { container: id.to_owned(), status, warnings: starting.warnings }
            }
            Err(problem) => {
                // The child is about to end, and is reaped as an orphan.
                let container = self.containers.remove(id);
                self.reap();
                remove_cgroup(container.as_ref().map(|c| &c.cgroup));
                if let Some(container) = container {
                    self.report_failed_start(id, container.status, &problem, starting.caller);
                }
                refused(&problem)
            }
        };
        let Caller { client, request } = starting.caller;
        self.send(client, &Message::Answer { id: request, answer });
        self.settle(id);
    }

    fn signal(&mut self, id: &str, signal: i32) -> Result<()> {
        let running = self.containers.get_mut(id).filter(|c| c.status.exit.is_none());
        let Some(container) = running else {
            return Ok(()); // what has ended needs no signal
        };
        // The program gets it: before execve(2), the process would lose it.
        if let Some(starting) = container.starting.as_mut().filter(|_| signal != libc::SIGKILL) {
            if !starting.signals.contains(&signal) {
                starting.signals.push(signal);
            }
            return Ok(());
        }
        let Some(pidfd) = &container.pidfd else { return Ok(()) };
        Ok(process::signal_pidfd(pidfd, signal).map(drop)?)
    }

    fn reopen_log(&mut self, id: &str) -> Result<()> {
        let container = self.containers.get_mut(id).ok_or(ShimError::NoContainer)?;
        let reopened = container.log.as_mut().map_or(Ok(()), LogFile::reopen);
        reopened.map_err(|source| ShimError::ReopenLog { source })
    }

    /// Reaps children that have ended: containers, and orphans that this subreaper adopted.
    fn reap(&mut self) {
        while let Ok(Some(_)) = self.signals.read_signal() {}
        while let Ok(Some((pid, exit))) = process::reap() {
            let found =
                self.containers.iter_mut().find(|(_, c)| c.status.pid == pid && c.status.exit.is_none());
            let Some((id, container)) = found else {
                if !self.holder_ended(pid) {
                    self.child_ended(pid, exit.shell_code());
                }
                continue;
            };
            // Fails if the container ended before it sent its terminal; then there is none to take.
            let _was_not_sent = container.take_terminal();
            let id = id.clone();
            container.drain(&id, &mut self.attachments);
            let oom_killed = exit != Exit::Code(0) && container.cgroup.oom_kills() > 0;
            let (code, start_problem) = (exit.shell_code(), None);
            container.status.exit = Some(Exited { code, finished_at: now(), oom_killed, start_problem });
            container.close_descriptors();
            self.settle(&id);
            // After the report: a client that sees the end finds the exit code.
            self.finish_attachments(&id);
        }
    }

    /// Reports a container's exit to all clients, once its start is complete.
    fn settle(&mut self, id: &str) {
        let Some(container) = self.containers.get(id) else { return };
        if container.starting.is_some() || container.status.exit.is_none() {
            return;
        }
        if let Some(program) = &self.config.oci_runtime {
            let state_dir = self.dir.join("oci");
            let runtime = OciRuntime { program, state_dir: &state_dir };
            if let Err(problem) = runtime.delete(id, &container_dir(&self.dir, id)) {
                note(&format!("container {id}: {}", chain(&problem)));
            }
        }
        remove_cgroup(Some(&container.cgroup));
        let message = Message::Exited { container: id.to_owned(), status: container.status.clone() };
        let record = self.save(id);
        for client in self.clients.keys().copied().collect::<Vec<_>>() {
            self.send(client, &message);
        }
        // Clients may be removing the container now, so nothing is made in its directory any more.
        if let Some(Err(error)) = record.map(|record| record.flush()) {
            note(&format!("flush the record of container {id}: {error}"));
        }
    }

    /// Where control groups are mounted.
    fn hierarchies(&self) -> std::result::Result<Hierarchies, linux::Error> {
        match &self.config.cgroup_mounts {
            Some(table) => Hierarchies::of_table(table.as_bytes()),
            None => Hierarchies::detect(),
        }
    }

    /// Saves the status for a runtime that starts after this shim has ended.
    fn save(&self, id: &str) -> Option<Unflushed> {
        let container = self.containers.get(id)?;
        let path = container_dir(&self.dir, id).join("status.json");
        record::save(&path, &container.status)
            .and_then(|()| Unflushed::open(&path))
            .inspect_err(|error| note(&chain(error)))
            .ok()
    }
}

/// Of poll(2), until then.
fn timeout(until: Option<Instant>) -> PollTimeout {
    let Some(until) = until else { return PollTimeout::NONE };
    // Rounded up, so that it has passed then.
    let left = until.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
    PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
}

fn refused(error: &ShimError) -> Answer {
    Answer::Refused { problem: error.shortened() }
}

/// A container with its own pid namespace has no process left. Processes of a hostPID container
/// that outlive its first one are killed.
fn remove_cgroup(cgroup: Option<&Cgroup>) {
    let Some(cgroup) = cgroup else { return };
    if cgroup.remove().is_ok() {
        return;
    }
    // `Shim::reap` reaps them: a child reaped here could be another container, whose exit would be
    // lost.
    if let Err(error) = cgroup.end(AFTER_KILL) {
        note(&chain(&error));
    }
}

/// Writes to the shim's own log: its stderr is `shim.log` in the sandbox's directory.
fn note(text: &str) {
    let _no_reader = writeln!(io::stderr(), "{} {}", jiff::Timestamp::now(), trace::escaped(text));
}
