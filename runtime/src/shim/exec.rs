//! Further programs in running containers: start, streams, exit, kill.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use linux::process::{self, Child};
use nix::poll::PollFd;
use oci_spec::runtime::Spec;

use super::error::{Result, ShimError};
use super::outcome::{Outcome, Starting};
use super::protocol::{Answer, Exec, Message, container_dir};
use super::relay::{Relay, pipe};
use super::{Caller, Container, Shim, note, refused, terminal};
use crate::error::chain;
use crate::launcher::{self, LaunchedBeside, Running as RunningContainer, StandardStreams, Stdio};

/// Programs at the same time, of all containers of the pod.
const MOST_EXECS: usize = 1024;
/// Of one program, in this process.
const MOST_DESCRIPTORS: u64 = 10;

/// All further programs of the pod.
#[derive(Debug, Default)]
pub(super) struct Execs {
    all: BTreeMap<String, Running>,
    /// Also of programs that have ended: a process that they left behind may still write.
    relays: BTreeMap<String, Vec<Relay>>,
}

#[derive(Debug)]
struct Running {
    /// Who started it; it is killed when that connection ends.
    client: u64,
    state: State,
    is_killed: bool,
}

#[derive(Debug)]
enum State {
    Starting {
        starting: Starting,
        /// The process that starts it.
        first: Child,
        /// Has the program's pid before the program goes on.
        number: File,
        /// The program, once its pid was read. What a process of the container may have written there instead
        /// is at most another child of this process.
        program: Option<i32>,
        /// Its exit code.
        ended: Option<i32>,
        /// Its terminal comes here.
        terminal: Option<(UnixStream, OwnedFd)>,
    },
    Runs {
        program: Child,
        terminal: Option<Terminal>,
    },
    /// With this exit code, which is reported after the output.
    Ended(i32),
}

/// Of a program that runs.
#[derive(Debug)]
struct Terminal {
    ours: OwnedFd,
    /// Kept open: the program may close its own ends, and open the terminal again. Without it, that would end
    /// both directions.
    _programs: Option<OwnedFd>,
}

impl Execs {
    /// Which outcomes and relays to wait for.
    pub(super) fn interest(&self) -> impl Iterator<Item = (Waits<'_>, Vec<PollFd<'_>>)> {
        let starting = self.all.iter().filter_map(|(id, running)| match &running.state {
            State::Starting { starting, .. } => {
                let fd = PollFd::new(starting.as_fd(), nix::poll::PollFlags::POLLIN);
                Some((Waits::Outcome(id), vec![fd]))
            }
            State::Runs { .. } | State::Ended(_) => None,
        });
        let relays = self
            .relays
            .iter()
            .flat_map(|(id, relays)| relays.iter().map(move |relay| (Waits::Stream(id), relay.interest())));
        starting.chain(relays)
    }

    /// Reads the pids of starting programs that are there by now.
    fn read_numbers(&mut self) {
        let known: Vec<i32> = self.all.values().flat_map(Running::pids).collect();
        for running in self.all.values_mut() {
            if let State::Starting { number, program, .. } = &mut running.state
                && program.is_none()
            {
                *program = read_pid(number).filter(|pid| !known.contains(pid));
            }
        }
    }
}

impl Running {
    fn pids(&self) -> Vec<i32> {
        match &self.state {
            State::Starting { first, program, .. } => program.iter().copied().chain([first.pid]).collect(),
            State::Runs { program, .. } => vec![program.pid],
            State::Ended(_) => Vec::new(),
        }
    }
}

/// Of the program with this id.
#[derive(Debug, Clone, Copy)]
pub(super) enum Waits<'a> {
    Outcome(&'a str),
    Stream(&'a str),
}

impl Shim {
    /// The answer follows once the program runs.
    pub(super) fn exec(&mut self, caller: Caller, exec: Exec, sockets: Vec<OwnedFd>) -> Result<()> {
        let Exec { exec: id, container, args, terminal, stdin } = exec;
        let most = usize::try_from(self.descriptor_limit / MOST_DESCRIPTORS).unwrap_or(usize::MAX);
        if self.execs.relays.len().max(self.execs.all.len()) >= most.min(MOST_EXECS) {
            return Err(ShimError::TooManyExecs { most: most.min(MOST_EXECS) });
        }
        if self.execs.all.contains_key(&id) {
            return Err(ShimError::StartedBefore);
        }
        let Container { pidfd, cgroup, starting, status, .. } =
            self.containers.get(&container).ok_or(ShimError::NoContainer)?;
        let first = pidfd.as_ref().filter(|_| starting.is_none()).ok_or(ShimError::NotRunning)?;
        let running = RunningContainer {
            cgroup,
            pid: status.pid,
            pidfd: first.as_fd(),
            has_no_device_control: status.not_enforced.is_some(),
        };
        let bundle = container_dir(&self.dir, &container);
        let spec =
            Spec::load(bundle.join("config.json")).map_err(|source| ShimError::Specification { source })?;
        let Streams { programs, relays, terminal } = streams(sockets, stdin, terminal)?;
        let launched = launcher::launch_beside(&spec, &args, running, &programs)
            .map_err(|problem| if has_ended(first) { ShimError::NotRunning } else { problem.into() })?;
        let LaunchedBeside { first, outcome, number } = launched;
        if let Err(e) = rustix::fs::fcntl_setfl(&number, rustix::fs::OFlags::NONBLOCK) {
            process::signal_pidfd(&first.pidfd, libc::SIGKILL)?;
            return Err(ShimError::Outcome { source: e.into() });
        }
        let starting = Starting::new(caller, File::from(outcome), Vec::new());
        let (program, ended, number) = (None, None, number.into());
        let state = State::Starting { starting, first, number, program, ended, terminal };
        self.execs.relays.insert(id.clone(), relays);
        self.execs.all.insert(id, Running { client: caller.client, state, is_killed: false });
        Ok(())
    }

    /// The outcome pipe of a starting program is readable or closed.
    pub(super) fn learn_exec_outcome(&mut self, id: &str) {
        self.execs.read_numbers();
        let Some(running) = self.execs.all.get_mut(id) else { return };
        let State::Starting { starting, program, ended, terminal, .. } = &mut running.state else { return };
        let outcome = match starting.read() {
            Outcome::Unknown => return,
            Outcome::Runs => follow(*program, *ended, terminal.take()),
            Outcome::Failed(problem) => Err(problem),
        };
        let (Caller { client, request }, is_killed) = (starting.caller, running.is_killed);
        let answer = match outcome {
            Ok((state, relays)) => {
                running.state = state;
                if let Some(relays) = relays {
                    self.execs.relays.insert(id.to_owned(), relays);
                }
                if is_killed {
                    self.kill_exec(id);
                }
                Answer::Done
            }
            Err(problem) => {
                self.kill_exec(id);
                self.execs.all.remove(id);
                self.execs.relays.remove(id);
                refused(&problem)
            }
        };
        self.send(client, &Message::Answer { id: request, answer });
        self.relay(id);
    }

    /// A child that is no container has ended.
    pub(super) fn child_ended(&mut self, pid: i32, code: i32) {
        self.execs.read_numbers();
        let is_program = |running: &Running| match &running.state {
            State::Starting { program, .. } => *program == Some(pid),
            State::Runs { program, .. } => program.pid == pid,
            State::Ended(_) => false,
        };
        let Some((id, running)) = self.execs.all.iter_mut().find(|(_, running)| is_program(running)) else {
            return;
        };
        match &mut running.state {
            State::Starting { ended, .. } => *ended = Some(code),
            State::Runs { .. } | State::Ended(_) => {
                running.state = State::Ended(code);
                let id = id.clone();
                self.relay(&id);
            }
        }
    }

    /// Nothing, if it has ended.
    pub(super) fn kill_exec(&mut self, id: &str) {
        self.execs.read_numbers();
        let Some(running) = self.execs.all.get_mut(id) else { return };
        running.is_killed = true;
        let killed = match &running.state {
            State::Runs { program, .. } => process::kill_with_group(program),
            // The program, if there is one by now, and who starts it.
            State::Starting { first, program, ended, .. } => {
                let program = program.filter(|_| ended.is_none());
                process::signal_pidfd(&first.pidfd, libc::SIGKILL).and_then(|_| {
                    match program.map(open_child).transpose()?.flatten() {
                        Some(program) => process::signal_pidfd(program, libc::SIGKILL).map(drop),
                        None => Ok(()),
                    }
                })
            }
            State::Ended(_) => Ok(()),
        };
        if let Err(error) = killed {
            note(&chain(&error));
        }
    }

    /// Nothing, if it has ended or has no terminal.
    pub(super) fn resize_exec(&self, id: &str, columns: u16, rows: u16) -> Result<()> {
        let Some(Running { state: State::Runs { terminal: Some(terminal), .. }, .. }) =
            self.execs.all.get(id)
        else {
            return Ok(());
        };
        Ok(linux::terminal::set_size(&terminal.ours, columns, rows)?)
    }

    /// The client that started them has gone.
    pub(super) fn kill_execs_of(&mut self, client: u64) {
        let of_client = |running: &Running| running.client == client;
        let ids: Vec<String> =
            self.execs.all.iter().filter(|(_, r)| of_client(r)).map(|(id, _)| id.clone()).collect();
        ids.iter().for_each(|id| self.kill_exec(id));
    }

    /// Moves what can be moved. The exit of a program that has ended is reported once its output was moved.
    pub(super) fn relay(&mut self, id: &str) {
        let state = self.execs.all.get(id).map(|running| &running.state);
        let (is_starting, code) = match state {
            Some(State::Starting { .. }) => (true, None),
            Some(State::Ended(code)) => (false, Some(*code)),
            Some(State::Runs { .. }) | None => (false, None),
        };
        let mut is_quiet = true;
        if let Some(relays) = self.execs.relays.get_mut(id) {
            if code.is_some() {
                relays.retain(|relay| !relay.is_input());
            }
            relays.retain_mut(|relay| {
                let goes_on = if code.is_some() { relay.finish() } else { relay.step() };
                is_quiet &= !goes_on || relay.is_empty();
                goes_on
            });
            if relays.is_empty() && !is_starting {
                self.execs.relays.remove(id);
            }
        }
        if let Some(code) = code.filter(|_| is_quiet) {
            self.execs.all.remove(id);
            let message = Message::ExecEnded { exec: id.to_owned(), code };
            for client in self.clients.keys().copied().collect::<Vec<_>>() {
                self.send(client, &message);
            }
        }
    }
}

/// A program after execve(2), and the relays of its terminal.
fn follow(
    program: Option<i32>,
    ended: Option<i32>,
    terminal: Option<(UnixStream, OwnedFd)>,
) -> Result<(State, Option<Vec<Relay>>)> {
    let relayed = terminal.map(take_over).transpose()?;
    let (terminal, relays) = relayed.unzip();
    if let Some(code) = ended {
        return Ok((State::Ended(code), relays));
    }
    let pid = program.ok_or(ShimError::EndedEarly)?;
    let pidfd = open_child(pid)?.ok_or(ShimError::EndedEarly)?;
    let terminal = terminal.map(|ours| {
        let programs = linux::terminal::open_peer(&ours).inspect_err(|e| note(&chain(e))).ok();
        Terminal { ours, _programs: programs }
    });
    Ok((State::Runs { program: Child { pid, pidfd }, terminal }, relays))
}

/// `None`: it is no child of this process.
fn open_child(pid: i32) -> linux::Result<Option<OwnedFd>> {
    if pid > 1 && process::is_child(pid)? { process::open_pidfd(pid) } else { Ok(None) }
}

/// What a program gets, and what connects it with the runtime's sockets.
struct Streams {
    programs: StandardStreams,
    relays: Vec<Relay>,
    terminal: Option<(UnixStream, OwnedFd)>,
}

fn streams(sockets: Vec<OwnedFd>, has_stdin: bool, has_terminal: bool) -> Result<Streams> {
    let wrong = |found| ShimError::WrongDescriptors { found, wanted: if has_terminal { 1 } else { 2 } };
    let failed = |name| move |source: rustix::io::Errno| ShimError::Pipe { name, source: source.into() };
    let found = sockets.len();
    let mut sockets = sockets.into_iter();
    if has_terminal {
        let socket = sockets.next().filter(|_| found == 1).ok_or_else(|| wrong(found))?;
        let (ours, theirs) =
            UnixStream::pair().map_err(|source| ShimError::Pipe { name: "terminal", source })?;
        let terminal = Some((ours, socket));
        return Ok(Streams {
            programs: StandardStreams::Terminal(theirs.into()),
            relays: Vec::new(),
            terminal,
        });
    }
    let (Some(stdout), Some(stderr)) = (sockets.next(), sockets.next()) else { return Err(wrong(found)) };
    let mut relays = Vec::new();
    let stdin = match (has_stdin, sockets.next()) {
        (true, Some(socket)) => {
            let (read, write) = pipe().map_err(failed("stdin"))?;
            relays.push(Relay::input(socket, write).map_err(failed("stdin"))?);
            Some(read)
        }
        (false, None) => None,
        _ => return Err(wrong(found)),
    };
    let mut output = |socket, name| {
        let (read, write) = pipe().map_err(failed(name))?;
        relays.push(Relay::output(read, socket).map_err(failed(name))?);
        Ok::<_, ShimError>(write)
    };
    let stdout = output(stdout, "stdout")?;
    let stderr = output(stderr, "stderr")?;
    Ok(Streams { programs: StandardStreams::Pipes(Stdio { stdin, stdout, stderr }), relays, terminal: None })
}

/// A program's new terminal, and both directions between it and the runtime's socket.
fn take_over((ours, socket): (UnixStream, OwnedFd)) -> Result<(OwnedFd, Vec<Relay>)> {
    let failed = |source: rustix::io::Errno| ShimError::Pipe { name: "terminal", source: source.into() };
    let terminal = terminal::receive(&ours)?;
    let copy = |fd: &OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, 0).map_err(failed);
    let relays = vec![
        Relay::input(copy(&socket)?, copy(&terminal)?).map_err(failed)?,
        Relay::output(copy(&terminal)?, socket).map_err(failed)?,
    ];
    Ok((terminal, relays))
}

/// `None`: it was not written yet.
fn read_pid(number: &mut File) -> Option<i32> {
    let mut bytes = [0; 4];
    number.read_exact(&mut bytes).ok()?;
    Some(i32::from_ne_bytes(bytes))
}

/// Its namespaces ended meanwhile (setns, ESRCH).
fn has_ended(container: &OwnedFd) -> bool {
    process::wait_for_end(container, Duration::ZERO).unwrap_or(false)
}
