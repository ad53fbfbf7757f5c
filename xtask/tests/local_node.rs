//! `cargo xtask up` and `down`, as programs, with the static products, in a mount and network
//! namespace of the test's own. Nothing may be left on the machine, no matter which process was killed.

#![expect(clippy::unwrap_used, reason = "a failure of the set-up fails the test")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Result, ensure};
use linux::process::{open_pidfd, signal_pidfd, wait_for_end};
use nix::sys::signal::Signal;
use tests::{Allowed, LeakCheck, Sandbox, eventually};

const TIMEOUT: Duration = Duration::from_secs(60);

/// The place of one node, and the machine as it was before.
struct Machine<'a> {
    sandbox: &'a Sandbox,
    before: LeakCheck,
    dir: PathBuf,
    cgroup: String,
}

impl<'a> Machine<'a> {
    fn new(sandbox: &'a Sandbox) -> Self {
        Self::named(sandbox, "up")
    }

    fn named(sandbox: &'a Sandbox, node: &str) -> Self {
        let dir = sandbox.path(node);
        let name = sandbox.dir().file_name().unwrap().display().to_string();
        let before = LeakCheck::start(sandbox, Allowed::default()).unwrap();
        Self { sandbox, before, dir, cgroup: format!("/{name}-{node}") }
    }

    fn command(&self, task: &str) -> Command {
        let mut command = self.sandbox.command(Path::new(env!("CARGO_BIN_EXE_xtask")));
        command.arg(task).arg("--dir").arg(&self.dir).env("HAWSER_BIN_DIR", tests::binaries::dir());
        if task == "up" {
            command.args(["--cgroup", &self.cgroup]);
        }
        command
    }

    fn succeed(&self, task: &str) -> String {
        printed(&self.command(task).output().unwrap())
    }

    /// A command that `up` has printed; what it prints.
    fn type_in(&self, line: &str) -> Result<String> {
        let output = self.sandbox.command(Path::new("/bin/sh")).args(["-c", line]).output()?;
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        ensure!(output.status.success(), "{line}: {}: {out}{err}", output.status);
        Ok(out.into_owned())
    }

    /// The node's processes: those whose arguments name its directory, and those of its control groups.
    fn processes(&self) -> Vec<i32> {
        let is_in_group = |pid: i32| {
            let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
            groups.lines().any(|line| line.splitn(3, ':').nth(2).is_some_and(|p| p.starts_with(&self.cgroup)))
        };
        let names_directory = |pid: i32| {
            let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&words).contains(&self.dir.display().to_string())
        };
        // Its next parent, which is not the node's, has not waited for it yet.
        let is_zombie = |pid: i32| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            status.lines().any(|line| line.starts_with("State:\tZ"))
        };
        let pids = fs::read_dir("/proc").unwrap();
        let pids = pids.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
        pids.filter(|pid| (is_in_group(*pid) || names_directory(*pid)) && !is_zombie(*pid)).collect()
    }

    /// SIGKILL to all of them at the same time, and their ends; their number.
    fn kill_all(&self) -> usize {
        let killed: Vec<_> =
            self.processes().into_iter().filter_map(|pid| open_pidfd(pid).unwrap()).collect();
        for process in &killed {
            signal_pidfd(process, Signal::SIGKILL as i32).unwrap();
        }
        for process in &killed {
            assert!(wait_for_end(process, TIMEOUT).unwrap());
        }
        killed.len()
    }

    /// Links, routes, nftables, mounts, files and sockets are as before; processes and control groups are gone.
    fn assert_nothing_is_left(&self) {
        self.before.verify(self.sandbox, Duration::from_secs(5)).unwrap();
        assert_eq!(self.processes(), Vec::<i32>::new());
        let hierarchies = fs::read_dir("/sys/fs/cgroup").unwrap().map(|entry| entry.unwrap().path());
        let groups = hierarchies.chain(["/sys/fs/cgroup".into()]).map(|root| root.join(&self.cgroup[1..]));
        assert_eq!(groups.filter(|group| group.exists()).collect::<Vec<_>>(), Vec::<PathBuf>::new());
    }
}

impl Drop for Machine<'_> {
    /// A failed test leaves no node behind.
    fn drop(&mut self) {
        let _failed_already = self.command("down").output();
    }
}

fn printed(output: &Output) -> String {
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}: {out}{err}", output.status);
    out.into_owned()
}

/// The lines that `up` prints to be typed next.
fn commands_of(printed: &str) -> Vec<&str> {
    printed.lines().filter_map(|line| line.strip_prefix("  ")).filter(|line| line.starts_with('/')).collect()
}

#[test]
fn what_up_prints_can_be_typed_and_down_removes_everything_also_after_kill_9() {
    let sandbox = Sandbox::new();
    let machine = Machine::new(&sandbox);
    let printed = machine.succeed("up");
    let commands = commands_of(&printed);
    let [apply, wait, get, logs] = commands[..] else { panic!("four commands are expected: {printed}") };
    machine.type_in(apply).unwrap();
    machine.type_in(wait).unwrap();
    let table = machine.type_in(get).unwrap();
    assert_eq!(table.matches(" Running ").count(), 2, "{table}");
    eventually("pod two has fetched the file of pod one", TIMEOUT, || {
        let log = machine.type_in(logs)?;
        ensure!(log.contains("fetched over v4"), "{log}");
        Ok(())
    })
    .unwrap();

    let again = machine.succeed("up");
    assert!(again.starts_with(&format!("the node in {} is up\n", machine.dir.display())), "{again}");
    assert_eq!(commands_of(&again), commands);

    let killed = machine.kill_all();
    assert!(killed > 5, "kubelet, driver, keeper, shims and pods are expected: {killed}");
    let removed = machine.succeed("down");
    assert!(removed.ends_with("nothing is left\n"), "{removed}");
    machine.assert_nothing_is_left();
    let again = machine.succeed("down");
    assert_eq!(again, format!("there is no node in {}: nothing to remove\n", machine.dir.display()));
}

#[test]
fn pods_end_by_themselves_before_down_removes_the_node() {
    let sandbox = Sandbox::new();
    let machine = Machine::new(&sandbox);
    let printed = machine.succeed("up");
    machine.type_in(commands_of(&printed)[0]).unwrap();
    eventually("pod two has read the volume", TIMEOUT, || {
        let log = machine.type_in(commands_of(&printed)[3])?;
        ensure!(log.contains("read "), "{log}");
        Ok(())
    })
    .unwrap();
    let removed = machine.succeed("down");
    assert!(
        removed.lines().any(|line| line.starts_with("ok ") && line.ends_with("stop the pods")),
        "{removed}"
    );
    machine.assert_nothing_is_left();
}

#[test]
fn an_up_that_is_killed_at_any_step_is_removed_and_can_be_continued() {
    let sandbox = Sandbox::new();
    let machine = Machine::new(&sandbox);
    for steps in 0..6 {
        let mut up = machine.command("up").stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let lines = BufReader::new(up.stdout.take().unwrap()).lines();
        let done = lines.map_while(Result::ok).filter(|line| line.starts_with("ok ")).take(steps).count();
        assert_eq!(done, steps);
        up.kill().unwrap();
        up.wait().unwrap();
        if steps == 5 {
            assert!(machine.succeed("up").contains("is up"));
        }
        machine.succeed("down");
        machine.assert_nothing_is_left();
    }
}

#[test]
fn up_refuses_a_machine_whose_addresses_pods_would_need_and_leaves_it_alone() {
    let sandbox = Sandbox::new();
    tests::netlink::create_bridge("users0", "10.244.8.7".parse().unwrap()).unwrap();
    let machine = Machine::new(&sandbox);
    let refused = machine.command("up").output().unwrap();
    let stderr = String::from_utf8_lossy(&refused.stderr);
    assert!(
        !refused.status.success() && stderr.contains("this machine has the address 10.244.8.7/24"),
        "{stderr}"
    );
    assert!(!machine.dir.exists());
    machine.assert_nothing_is_left();
}

#[test]
fn a_machine_has_one_node_also_while_its_processes_are_dead() {
    let sandbox = Sandbox::new();
    let (first, second) = (Machine::named(&sandbox, "up"), Machine::named(&sandbox, "other"));
    first.succeed("up");
    assert!(first.kill_all() > 1, "kubelet and driver");
    let refused = |machine: &Machine<'_>, holder: &Machine<'_>| {
        let output = machine.command("up").output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        let words = format!("the node in {} has this machine's network", holder.dir.display());
        assert!(!output.status.success() && stderr.contains(&words), "{stderr}");
    };
    refused(&second, &first);
    assert!(!second.dir.exists());
    // The first one comes back, and goes.
    first.succeed("up");
    first.succeed("down");
    second.succeed("up");
    second.succeed("down");
    second.assert_nothing_is_left();
}

#[test]
fn down_leaves_a_directory_alone_that_up_did_not_make() {
    let sandbox = Sandbox::new();
    let dir = sandbox.make_dir("up").unwrap();
    fs::write(dir.join("letter"), "of another program").unwrap();
    let machine = Machine::new(&sandbox);
    let refused = machine.command("down").output().unwrap();
    let stderr = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && stderr.contains("cargo xtask up did not make it"), "{stderr}");
    machine.assert_nothing_is_left();
}
