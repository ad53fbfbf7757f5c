//! ADD, DEL and GC with a fault at every one of their system calls: kill -9 before
//! and after it, and an error in its place. Then no address is lost and none
//! is held twice, and all goes on with the next call.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use ipam_host_local::{Error, LeaseStore, LockedStore, Owner, RangeSet, RawRange, allocate};
use nix::errno::Errno;
use serde_json::{Value, json};
use tests::trace_calls::{self, Call, Fault, Injection, Run};

/// Two range sets of three addresses each.
struct Network {
    dir: tempfile::TempDir,
}

/// What is there when the fault is injected.
#[derive(Clone, Copy, Debug)]
enum Before {
    /// No directory.
    Nothing,
    /// `a` and `b` hold an address of each set.
    Leases,
    /// The same, and the reference has taken one away since.
    ForeignChange,
    /// The same, and the reference left an empty file.
    EmptyLease,
}

impl Network {
    fn new(before: Before) -> Self {
        let net = Self { dir: tempfile::tempdir().unwrap() };
        if matches!(before, Before::Nothing) {
            return net;
        }
        for id in ["a", "b"] {
            net.add(id).unwrap();
        }
        match before {
            Before::Nothing | Before::Leases => {}
            Before::ForeignChange => {
                std::fs::write(net.path("10.1.0.4"), "theirs\r\neth0").unwrap();
                std::fs::remove_file(net.path("10.1.0.4")).unwrap();
            }
            Before::EmptyLease => std::fs::write(net.path("10.1.0.4"), "").unwrap(),
        }
        net
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join("net").join(name)
    }

    fn command(verb: &str, id: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_host-local"));
        for (name, value) in [
            ("COMMAND", verb),
            ("CONTAINERID", id),
            ("IFNAME", "eth0"),
            ("NETNS", "/dummy"),
            ("PATH", "/dummy"),
        ] {
            command.env(format!("CNI_{name}"), value);
        }
        command
    }

    fn conf(&self) -> Vec<u8> {
        let ranges = json!([[{"subnet": "10.1.0.0/29", "rangeEnd": "10.1.0.4"}], [{"subnet": "fd00::/125", "rangeEnd": "fd00::4"}]]);
        json!({
            "cniVersion": "1.1.0",
            "name": "net",
            "ipam": {"dataDir": self.dir.path(), "ranges": ranges},
            "cni.dev/valid-attachments": [{"containerID": "a", "ifname": "eth0"}],
        })
        .to_string()
        .into_bytes()
    }

    fn traced(&self, verb: &str, id: &str, injection: Option<Injection>) -> Run {
        let run = trace_calls::run(&Self::command(verb, id), &self.conf(), injection).unwrap();
        assert!(!run.hung, "{verb} hangs, with a fault at {:?}", run.injected);
        run
    }

    /// What comes before and after the fault, without a process.
    fn locked<T>(&self, work: impl FnOnce(&mut LockedStore<'_>) -> Result<T, Error>) -> Result<T, Error> {
        let store = LeaseStore::create(self.dir.path(), "net")?;
        let mut locked = store.lock()?;
        let outcome = work(&mut locked);
        locked.finish();
        outcome
    }

    fn add(&self, id: &str) -> Result<(), Error> {
        self.locked(|store| allocate(store, &ranges(), &[], &owner(id)).map(drop))
    }

    fn del(&self, id: &str) {
        self.locked(|store| store.release(&owner(id), true, &[]).map(drop)).unwrap();
    }

    /// Address: content, of every lease.
    fn leases(&self) -> BTreeMap<String, String> {
        let entries = std::fs::read_dir(self.dir.path().join("net")).into_iter().flatten();
        let lease = |path: &Path| {
            let name = path.file_name()?.to_str()?.to_owned();
            name.parse::<std::net::IpAddr>().ok()?;
            Some((name, std::fs::read_to_string(path).unwrap()))
        };
        entries.filter_map(|entry| lease(&entry.unwrap().path())).collect()
    }

    fn held_by(&self, id: &str) -> usize {
        self.leases().values().filter(|content| **content == format!("{id}\r\neth0")).count()
    }

    /// The reference has three names beside the leases, and nobody has another.
    fn assert_nothing_else(&self, when: &str) {
        for entry in std::fs::read_dir(self.dir.path().join("net")).into_iter().flatten() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let known = name == "lock"
                || name.starts_with("last_reserved_ip.")
                || name.parse::<std::net::IpAddr>().is_ok();
            assert!(known, "{when}: {name}");
        }
    }

    /// After DEL of `c`, three containers fit and a fourth does not.
    fn assert_sound(&self, when: &str) {
        self.assert_nothing_else(when);
        for (ip, content) in self.leases() {
            let known = ["a\r\neth0", "b\r\neth0", "c\r\neth0", ""].contains(&content.as_str());
            assert!(known, "{when}: {ip} holds {content:?}");
        }
        self.del("c");
        assert_eq!(self.held_by("c"), 0, "{when}");
        for id in ["a", "b"] {
            let held = self.locked(|store| store.held_by(&owner(id))).unwrap();
            assert_eq!(held.all().count(), self.held_by(id), "{when}: {id}");
            if held.all().count() < 2 {
                self.del(id);
                self.add(id).unwrap_or_else(|e| panic!("{when}: ADD of {id}: {e:?}"));
            }
        }
        self.add("c").unwrap_or_else(|e| panic!("{when}: ADD of c: {e:?}"));
        assert_eq!(self.leases().len(), 6, "{when}: {:?}", self.leases());
        let refused = cni_plugin::CniError::from(self.add("d").unwrap_err());
        assert!(refused.msg.contains("no IP addresses available"), "{when}: {refused}");
        for id in ["a", "b", "c"] {
            self.del(id);
        }
        assert_eq!(self.leases().len(), 0, "{when}");
    }
}

fn owner(id: &str) -> Owner {
    Owner { container_id: id.to_owned(), ifname: "eth0".to_owned() }
}

/// As in [`Network::conf`].
fn ranges() -> Vec<RangeSet> {
    [("10.1.0.0/29", "10.1.0.4"), ("fd00::/125", "fd00::4")]
        .map(|(subnet, end)| {
            let subnet = cni_plugin::conf::parse_cidr(subnet);
            RangeSet::new(&[RawRange { subnet, end: end.parse().ok(), ..RawRange::default() }]).unwrap()
        })
        .to_vec()
}

/// `verb` of container `id`, with each of `faults` at each of its calls.
fn inject_everywhere(
    before: Before,
    verb: &str,
    id: &str,
    faults: &[Fault],
    check: impl Fn(&Network, &Run, &str),
) {
    for call in &calls(before, verb, id) {
        for fault in faults {
            let net = Network::new(before);
            let injection = Injection { point: call.point, name: call.name, fault: *fault };
            let run = net.traced(verb, id, Some(injection));
            let when = format!("{verb} with {before:?}, {fault:?} at {call}");
            check(&net, &run, &when);
            net.assert_sound(&when);
        }
    }
}

/// The calls of an undisturbed run, from the leases' directory on: what comes
/// before, reading what is to be done, touches nothing.
fn calls(before: Before, verb: &str, id: &str) -> Vec<Call> {
    let calls = Network::new(before).traced(verb, id, None).calls;
    let first = calls.iter().position(|call| call.object.ends_with("/net")).unwrap();
    calls[first..].to_vec()
}

const KILLS: [Fault; 2] = [Fault::KillBefore, Fault::KillAfter];
const ERRORS: [Fault; 2] = [Fault::Fail(Errno::ENOSPC), Fault::Fail(Errno::EIO)];

fn is_killed(_: &Network, run: &Run, when: &str) {
    assert!(run.code.is_none() || run.injected.is_none(), "{when}: {run:?}");
}

/// A failed ADD has left nothing, and says what failed.
fn is_whole(net: &Network, run: &Run, when: &str) {
    let held = net.held_by("c");
    if run.code == Some(0) {
        assert_eq!(held, 2, "{when}");
        return;
    }
    assert_eq!((run.code, held), (Some(1), 0), "{when}: {:?}", net.leases());
    net.assert_nothing_else(when);
    // Where standard output fails there is nothing to read.
    if let Ok(error) = serde_json::from_str::<Value>(&run.stdout) {
        assert_eq!(error["code"], 999, "{when}: {error}");
        let msg = error["msg"].as_str().unwrap();
        let known = ["no space left on device", "input/output error"].iter().any(|text| msg.ends_with(text));
        assert!(known, "{when}: {msg}");
    }
}

#[test]
fn a_killed_add_loses_and_doubles_nothing() {
    for before in [Before::Nothing, Before::Leases, Before::ForeignChange, Before::EmptyLease] {
        inject_everywhere(before, "ADD", "c", &KILLS, is_killed);
    }
}

#[test]
fn a_killed_del_loses_and_doubles_nothing() {
    for before in [Before::Leases, Before::ForeignChange] {
        inject_everywhere(before, "DEL", "a", &KILLS, |net, run, when| {
            is_killed(net, run, when);
            assert_eq!(net.held_by("b"), 2, "{when}");
        });
    }
}

#[test]
fn a_killed_gc_removes_nothing_that_is_in_use() {
    inject_everywhere(Before::Leases, "GC", "", &KILLS, |net, run, when| {
        is_killed(net, run, when);
        assert_eq!(net.held_by("a"), 2, "{when}");
    });
}

#[test]
fn a_failed_add_leaves_nothing() {
    for before in [Before::Nothing, Before::Leases, Before::EmptyLease] {
        inject_everywhere(before, "ADD", "c", &ERRORS, is_whole);
    }
}

#[test]
fn a_failed_del_can_be_repeated() {
    inject_everywhere(Before::Leases, "DEL", "a", &ERRORS, |net, run, when| {
        assert_eq!(net.held_by("b"), 2, "{when}");
        assert!(run.code == Some(1) || net.held_by("a") == 0, "{when}");
    });
}

#[test]
fn an_interrupted_call_is_repeated() {
    // What the kernel may interrupt; the rest never returns that.
    let interruptible = ["flock", "read", "write", "pread64", "pwrite64"];
    for call in calls(Before::Leases, "ADD", "c").iter().filter(|call| interruptible.contains(&call.name)) {
        let net = Network::new(Before::Leases);
        let fault = Fault::Fail(Errno::EINTR);
        let run = net.traced("ADD", "c", Some(Injection { point: call.point, name: call.name, fault }));
        assert_eq!(run.code, Some(0), "{call}: {}", run.stdout);
        net.assert_sound(&format!("EINTR at {call}"));
    }
}
