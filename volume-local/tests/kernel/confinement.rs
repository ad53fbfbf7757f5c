//! What the daemon can still do and see while it serves.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::fixture::{NONCE, Setup, Volume};

/// CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETGID, SETUID (linux/capability.h).
const SIX_CAPABILITIES: &str = "00000000000000db";

fn confined() -> Volume {
    used(Volume::with(Setup { confine: true, ..Setup::default() }))
}

fn used(volume: Volume) -> Volume {
    // Some life first: threads act as callers, nodes are opened and closed.
    for n in 0..20 {
        volume.shell(crate::fixture::ALICE, &format!("echo {n} > f{n}; truncate -s 1 f{n}"));
    }
    volume
}

fn status(task: &Path) -> BTreeMap<String, String> {
    fs::read_to_string(task.join("status"))
        .unwrap()
        .lines()
        .filter_map(|line| line.split_once(":\t"))
        .map(|(key, value)| (key.to_owned(), value.trim().to_owned()))
        .collect()
}

#[test]
fn every_thread_has_exactly_six_capabilities_no_new_privs_and_a_filter() {
    for confine in [true, false] {
        let volume = used(Volume::with(Setup { confine, in_a_group: true, ..Setup::default() }));
        let tasks: Vec<PathBuf> = fs::read_dir(format!("/proc/{}/task", volume.pid()))
            .unwrap()
            .map(|task| task.unwrap().path())
            .collect();
        assert!(tasks.len() > 1, "event loops run beside the main thread");
        for task in tasks {
            let status = status(&task);
            for set in ["CapPrm", "CapEff", "CapBnd"] {
                assert_eq!(status[set], SIX_CAPABILITIES, "{set} of {}", task.display());
            }
            for set in ["CapInh", "CapAmb"] {
                assert_eq!(status[set], "0000000000000000", "{set} of {}", task.display());
            }
            assert_eq!(status["Groups"], "", "{}", task.display());
            assert_eq!((status["NoNewPrivs"].as_str(), status["Seccomp"].as_str()), ("1", "2"));
        }
    }
}

#[test]
fn a_confined_daemon_has_its_own_namespaces_and_an_empty_root() {
    let volume = confined();
    let proc = PathBuf::from(format!("/proc/{}", volume.pid()));
    for namespace in ["mnt", "net", "ipc", "uts"] {
        let own = fs::read_link(proc.join("ns").join(namespace)).unwrap();
        let ours = fs::read_link(Path::new("/proc/thread-self/ns").join(namespace)).unwrap();
        assert_ne!(own, ours, "{namespace}");
    }
    let mounts = fs::read_to_string(proc.join("mountinfo")).unwrap();
    assert_eq!(mounts.lines().count(), 1, "{mounts}");
    assert!(mounts.contains(" / / ro,nosuid,nodev,noexec") && mounts.contains(" - tmpfs "), "{mounts}");
    assert_eq!(fs::read_dir(proc.join("root")).unwrap().count(), 0);
    let links = fs::read_to_string(proc.join("net/dev")).unwrap();
    assert_eq!(links.lines().count(), 3, "two lines of heading and lo: {links}");
}

#[test]
fn the_daemon_holds_no_descriptor_beyond_its_volume() {
    let volume = confined();
    let proc = PathBuf::from(format!("/proc/{}", volume.pid()));
    let device = |path: &Path| std::os::unix::fs::MetadataExt::dev(&fs::metadata(path).unwrap());
    let inode = |path: &Path| std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).unwrap());
    let (backing, descriptors) = (device(&volume.backing), device(&proc));
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(proc.join("fd")).unwrap() {
        let path = entry.unwrap().path();
        let number: u32 = path.file_name().unwrap().to_str().unwrap().parse().unwrap();
        let target = fs::read_link(&path).unwrap();
        let kind = match number {
            0..=2 => "stdio",
            _ if target == Path::new("/dev/fuse") => "fuse",
            _ if target.to_str().is_some_and(|name| name.starts_with("socket:")) => "listener",
            _ if target == Path::new("anon_inode:[eventfd]") => "own event",
            _ if target == volume.usage_file() => "usage file",
            _ if device(&path) == backing => "volume",
            _ if device(&path) == descriptors && inode(&path) == inode(&path.join("..")) => {
                "own descriptors, with no way up"
            }
            _ => panic!("descriptor {number} is {}", target.display()),
        };
        *found.entry(kind).or_insert(0) += 1;
    }
    let others = ["stdio", "fuse", "own descriptors, with no way up", "listener", "usage file", "own event"];
    assert_eq!(others.map(|kind| found[kind]), [3, 2, 1, 2, 1, 1], "{found:?}");
    assert!(found["volume"] > 1, "the tree and recently used nodes: {found:?}");
}

#[test]
fn the_nonce_is_gone_from_the_environment_and_its_memory() {
    let volume = Volume::new();
    let environment = fs::read(format!("/proc/{}/environ", volume.pid())).unwrap();
    assert!(!environment.windows(NONCE.len()).any(|window| window == NONCE.as_bytes()));
}

#[test]
fn an_idle_daemon_is_small() {
    let volume = confined();
    let status = status(Path::new(&format!("/proc/{}", volume.pid())));
    let resident: u64 = status["VmRSS"].trim_end_matches(" kB").parse().unwrap();
    // A debug build; the static release build is well below.
    assert!(resident < 16 * 1024, "{resident} KiB");
}
