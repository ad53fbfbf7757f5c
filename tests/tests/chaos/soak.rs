//! Memory and descriptors of driver, keeper and daemons after a long time of kills.

use std::fs;
use std::time::{Duration, Instant};

use tests::eventually;

use crate::suite::{Class, Suite};
use crate::{is_long, process};

const NAMES: [&str; 4] = ["file", "names", "sqlite-wal", "archive"];
const AT_REST: Duration = Duration::from_secs(60);
/// A process may have this much more than after the warm-up.
const MORE_MEMORY_KIB: u64 = 6 << 10;
const MORE_DESCRIPTORS: usize = 4;
/// And for each volume: a driver holds the log of a daemon that it started itself, and some calls of
/// the moment. A leak at each kill would be hundreds in the long form.
const MORE_DESCRIPTORS_A_VOLUME: usize = 3;

#[derive(Debug, Clone, Copy, Default)]
struct Size {
    memory_kib: u64,
    descriptors: usize,
}

/// The largest of each kind of process.
type Sizes = [(&'static str, Size); 3];

#[test]
fn memory_and_descriptors_are_steady_under_mixed_load_and_kills() {
    let (volumes, warm_up, rest) = match is_long() {
        true => (8, Duration::from_secs(120), Duration::from_secs(480)),
        false => (2, Duration::from_secs(6), Duration::from_secs(12)),
    };
    let mut suite = Suite::start();
    for number in 0..volumes {
        suite.class = if number % 2 == 0 { Class::ByDaemon } else { Class::Passing };
        suite.volume();
    }
    load(&mut suite, warm_up);
    let before = sizes(&suite);
    load(&mut suite, rest);
    // The keeper closes removed files one after the other, which frees their blocks.
    let steady = eventually("memory and descriptors are as before", AT_REST, || {
        let after = sizes(&suite);
        for ((name, before), (_, after)) in before.iter().zip(&after) {
            let is_steady = after.memory_kib <= before.memory_kib + MORE_MEMORY_KIB
                && after.descriptors
                    <= before.descriptors + MORE_DESCRIPTORS + volumes * MORE_DESCRIPTORS_A_VOLUME;
            anyhow::ensure!(is_steady, "{name}: {before:?} after the warm-up, {after:?} at the end");
        }
        Ok(after)
    });
    let after = steady.unwrap_or_else(|error| suite.fail(&format!("{error:#}")));
    eprintln!("after the warm-up {before:?}\nat the end {after:?}");
    suite.finish();
}

/// All applications on all volumes, with kills, for this long; then they end. So processes are compared
/// at rest.
fn load(suite: &mut Suite, time: Duration) {
    for (number, volume) in suite.volumes.clone().iter().enumerate() {
        suite.applications(volume, &[NAMES[number % NAMES.len()], NAMES[(number + 1) % NAMES.len()]]);
    }
    suite.progress();
    let begun = Instant::now();
    while begun.elapsed() < time {
        suite.kill();
    }
    suite.end_applications();
    suite.have_keeper();
    // Files that were removed while they were open are closed now. A daemon that has taken a volume over
    // asks the kernel some seconds later which of them it still knows.
    let begun = Instant::now();
    let none = eventually("no removed file is held", AT_REST, || {
        let held = process::removed_files(&suite.scene);
        anyhow::ensure!(held == Some(0), "{held:?}");
        Ok(())
    });
    none.unwrap_or_else(|error| suite.fail(&format!("{error:#}")));
    eprintln!("at rest after {:?}", begun.elapsed());
}

fn sizes(suite: &Suite) -> Sizes {
    let daemons = suite.volumes.iter().map(|volume| size(suite.daemon(volume).pid));
    let larger = |a: Size, b: Size| Size {
        memory_kib: a.memory_kib.max(b.memory_kib),
        descriptors: a.descriptors.max(b.descriptors),
    };
    [
        ("driver", size(suite.scene.driver.as_ref().unwrap().pid().as_raw())),
        ("keeper", size(process::keeper(&suite.scene).unwrap())),
        ("daemon", daemons.reduce(larger).unwrap()),
    ]
}

fn size(pid: i32) -> Size {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let memory_kib = resident.trim().trim_end_matches(" kB").parse().unwrap();
    Size { memory_kib, descriptors: fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count() }
}
