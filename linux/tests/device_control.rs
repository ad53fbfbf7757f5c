//! Device rules in the kernel: a process in a restricted group opens and makes
//! device nodes, and is answered as `Policy::allows` says, by the v1 controller
//! and by the BPF program of cgroup v2. Needs root and a cgroup2 mount.

#![expect(clippy::unwrap_used, reason = "a test helper fails by panicking")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use linux::cgroup::{DeviceControl, Hierarchies, Limits};
use linux::device_rules::{Access, DeviceKind, DeviceRule, Devices, Policy};
use linux::mountinfo;
use proptest::prelude::*;

/// null and zero, numbers that no driver has, and the same as block devices:
/// what is not refused by the group fails otherwise, or does no harm.
const NUMBERS: [(u32, u32); 4] = [(1, 3), (1, 5), (240, 3), (240, 5)];

/// Answers one letter for each probe: 0 where the kernel said EPERM.
const PROBES: &str = r#"
echo 0 > "$1" || exit 9
dir=$2
probe() {
    case "$( (eval "$1") 2>&1 )" in *"not permitted"*) printf 0 ;; *) printf 1 ;; esac
}
for kind in b c; do
    for numbers in "1 3" "1 5" "240 3" "240 5"; do
        node="$dir/$kind-${numbers% *}-${numbers#* }"
        probe ": < $node"
        probe ": >> $node"
        probe ": <> $node"
        probe "mknod $dir/new $kind $numbers && rm $dir/new"
    done
done
"#;
const ACCESSES: [&str; 4] = ["r", "w", "rw", "m"];

struct Group {
    hierarchies: Hierarchies,
    parent: PathBuf,
    made: Vec<PathBuf>,
}

impl Group {
    fn new(hierarchies: Hierarchies) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let parent = PathBuf::from(format!("/hawser-devices-{}-{number}", std::process::id()));
        let made = hierarchies.ensure_parent(&parent).unwrap();
        Self { hierarchies, parent, made }
    }

    /// A process of a new group with `policy` tries everything in `nodes`.
    fn answers(&self, policy: &Policy, nodes: &Path) -> String {
        let path = self.parent.join("c");
        let (group, _unmet) = self.hierarchies.create(&path, &Limits::default()).unwrap();
        group.restrict_devices(policy).unwrap();
        let relative = path.strip_prefix("/").unwrap();
        let procs = match self.hierarchies.device_control() {
            DeviceControl::V1(root) => root.join(relative).join("cgroup.procs"),
            DeviceControl::V2(root) => root.join(relative).join("cgroup.procs"),
            DeviceControl::Missing => panic!("{:?}", self.hierarchies),
        };
        let output = Command::new("sh")
            .args(["-c", PROBES, "sh"])
            .args([&procs, nodes])
            .env("LC_ALL", "C")
            .output()
            .unwrap();
        group.remove().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let left = linux::cgroup::remove_dirs(&self.made);
        assert!(left.is_empty() || std::thread::panicking(), "left behind: {left:?}");
    }
}

/// This machine as it is if it has v1's controller, and as if it had v2 alone.
fn machines() -> Vec<Hierarchies> {
    let mounts = mountinfo::read().unwrap();
    let v2_alone: Vec<_> = mounts.iter().filter(|m| m.fs_type != "cgroup").cloned().collect();
    let mut machines = vec![Hierarchies::of(&v2_alone).unwrap()];
    let own = Hierarchies::of(&mounts).unwrap();
    if own.has("devices") {
        machines.push(own);
    }
    assert!(matches!(machines[0].device_control(), DeviceControl::V2(_)), "no cgroup2 mount: {machines:?}");
    machines
}

fn nodes() -> tempfile::TempDir {
    use nix::sys::stat::{Mode, SFlag, makedev, mknod};
    let dir = tempfile::tempdir().unwrap();
    for (letter, kind) in [("b", SFlag::S_IFBLK), ("c", SFlag::S_IFCHR)] {
        for (major, minor) in NUMBERS {
            let path = dir.path().join(format!("{letter}-{major}-{minor}"));
            let device = makedev(major.into(), minor.into());
            mknod(&path, kind, Mode::from_bits_truncate(0o600), device).unwrap();
        }
    }
    dir
}

/// What the probes must answer, by the rules of v1.
fn expected(policy: &Policy) -> String {
    let mut answers = String::new();
    for kind in [DeviceKind::Block, DeviceKind::Character] {
        for numbers in NUMBERS {
            for access in ACCESSES {
                let allowed = policy.allows(kind, numbers, Access::parse(access).unwrap());
                answers.push(if allowed { '1' } else { '0' });
            }
        }
    }
    answers
}

fn some(allow: bool, kind: DeviceKind, major: Option<u32>, minor: Option<u32>, access: Access) -> DeviceRule {
    DeviceRule { allow, devices: Devices::Some { kind, major, minor }, access }
}

fn rule() -> impl Strategy<Value = DeviceRule> {
    let access = prop::sample::subsequence(vec!["r", "w", "m"], 1..=3)
        .prop_map(|letters| Access::parse(&letters.concat()).unwrap());
    let kind = prop_oneof![Just(DeviceKind::Block), Just(DeviceKind::Character)];
    let major = prop_oneof![Just(None), Just(Some(1)), Just(Some(240))];
    let minor = prop_oneof![Just(None), Just(Some(3)), Just(Some(5))];
    let one = (any::<bool>(), kind, major, minor, access)
        .prop_map(|(allow, kind, major, minor, access)| some(allow, kind, major, minor, access));
    let all =
        any::<bool>().prop_map(|allow| DeviceRule { allow, devices: Devices::All, access: Access::ALL });
    prop_oneof![8 => one, 1 => all]
}

#[test]
fn every_list_of_rules_means_the_same_on_v1_and_on_v2() {
    let (nodes, machines) = (nodes(), machines());
    let groups: Vec<Group> = machines.into_iter().map(Group::new).collect();
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 24,
        // Each step of a reduction costs a dozen processes.
        max_shrink_iters: 64,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let rules = prop::collection::vec(rule(), 0..8);
    runner
        .run(&rules, |rules| {
            let policy = Policy::of(&rules);
            for group in &groups {
                let control = group.hierarchies.device_control();
                prop_assert_eq!(group.answers(&policy, nodes.path()), expected(&policy), "{:?}", control);
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn the_rules_of_an_ordinary_container_leave_null_and_nothing_else_of_these() {
    let nodes = nodes();
    let policy = Policy::of(&[
        DeviceRule { allow: false, devices: Devices::All, access: Access::ALL },
        some(true, DeviceKind::Block, None, None, Access::MKNOD),
        some(true, DeviceKind::Character, None, None, Access::MKNOD),
        some(true, DeviceKind::Character, Some(1), Some(3), Access::ALL),
    ]);
    for machine in machines() {
        let group = Group::new(machine);
        // Read, write, both, mknod: of four block devices, of null, of three others.
        assert_eq!(group.answers(&policy, nodes.path()), "0001000100010001".to_owned() + "1111000100010001");
    }
}

#[test]
fn a_program_adds_to_those_of_the_groups_above() {
    let nodes = nodes();
    let mounts: Vec<_> = mountinfo::read().unwrap().into_iter().filter(|m| m.fs_type != "cgroup").collect();
    let group = Group::new(Hierarchies::of(&mounts).unwrap());
    let DeviceControl::V2(root) = group.hierarchies.device_control() else { panic!("no cgroup2 mount") };
    let above = Policy::of(&[some(true, DeviceKind::Character, None, None, Access::READ)]);
    let program = linux::bpf::DeviceProgram::load(&above.program()).unwrap();
    program.attach(&root.join(group.parent.strip_prefix("/").unwrap())).unwrap();
    let everything_but_block = Policy::of(&[some(true, DeviceKind::Character, None, None, Access::ALL)]);
    assert_eq!(group.answers(&everything_but_block, nodes.path()), "0".repeat(16) + &"1000".repeat(4));
}

#[test]
fn a_program_that_the_kernel_refuses_is_an_error_with_its_reason() {
    let error = linux::bpf::DeviceProgram::load(&[]).unwrap_err();
    assert_eq!(error.to_string(), "load BPF device program of 0 instructions");
    assert!([nix::errno::Errno::E2BIG, nix::errno::Errno::EINVAL].contains(&error.errno()), "{error:?}");
    let program = linux::bpf::DeviceProgram::load(&Policy::of(&[]).program()).unwrap();
    let error = program.attach(Path::new("/")).unwrap_err();
    assert_eq!(error.to_string(), "attach BPF device program to cgroup /");
    assert_eq!(error.errno(), nix::errno::Errno::EBADF);
}
