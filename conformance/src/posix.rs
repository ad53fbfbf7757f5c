//! Suite `posix`: other people's tests of file systems, in volumes of each data path, on pools of each file
//! system. The suites are built by the user: no package and no Go module has them.

mod pjdfstest;

use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use ::tests::Sandbox;
use ::tests::csi::scene::{Flags, Scene, create_request};
use ::tests::csi::snapshots::{of_size, with};
use ::tests::loop_device::{FileSystem, LoopMount};
use anyhow::{Context, Result, anyhow, bail, ensure};
use xtask::build;
use xtask::foreign::debian_program;
use xtask::progress::{part, say};

/// Set for the process that runs the suites: the driver, which the other binaries are beside.
const DRIVER: &str = "CARGO_BIN_EXE_hawser-csi";
/// Sparse.
const POOL_BYTES: u64 = 4 << 30;
const VOLUME_BYTES: i64 = 2 << 30;
/// Between two kills, where the volume's daemons are killed meanwhile.
const BETWEEN_KILLS: Duration = Duration::from_millis(700);

/// A volume to test.
struct Ground {
    title: &'static str,
    kind: FileSystem,
    parameters: &'static [(&'static str, &'static str)],
    /// Its daemons are killed, and others follow.
    takeovers: bool,
}

const BY_DAEMON: &[(&str, &str)] = &[("dataPath", "daemon"), ("capacity", "daemon")];
const PASSING: &[(&str, &str)] = &[("dataPath", "passthrough"), ("capacity", "none")];

const GROUNDS: [Ground; 8] = [
    ground("ext4, by the daemon", FileSystem::Ext4, BY_DAEMON, false),
    ground("ext4, passing through", FileSystem::Ext4, PASSING, false),
    ground("xfs, by the daemon", FileSystem::Xfs, BY_DAEMON, false),
    ground("xfs, passing through", FileSystem::Xfs, PASSING, false),
    ground("btrfs, by the daemon", FileSystem::Btrfs, BY_DAEMON, false),
    ground("btrfs, passing through", FileSystem::Btrfs, PASSING, false),
    ground("ext4, by the daemon, with takeovers", FileSystem::Ext4, BY_DAEMON, true),
    ground("ext4, passing through, with takeovers", FileSystem::Ext4, PASSING, true),
];

const fn ground(
    title: &'static str,
    kind: FileSystem,
    parameters: &'static [(&'static str, &'static str)],
    takeovers: bool,
) -> Ground {
    Ground { title, kind, parameters, takeovers }
}

/// `only`: of grounds whose title contains this.
pub(super) fn run(pjdfstest: Option<&Path>, only: Option<&str>) -> Result<()> {
    let Some(dir) = pjdfstest else {
        bail!(
            "suite posix needs --pjdfstest DIR: clone github.com/pjd/pjdfstest, and there run autoreconf -ifs, \
             ./configure and make pjdfstest (Debian's packages autoconf, automake, gcc and make)"
        );
    };
    let suite = pjdfstest::Suite::open(dir)?;
    for (program, package) in
        [("mkfs.ext4", "e2fsprogs"), ("mkfs.xfs", "xfsprogs"), ("mkfs.btrfs", "btrfs-progs")]
    {
        debian_program(program, package)?;
    }
    if std::env::var_os(DRIVER).is_none() {
        return again(&part("build the static binaries", build::products)?);
    }
    let mut counts = pjdfstest::Counts::default();
    let grounds = GROUNDS.iter().filter(|ground| only.is_none_or(|word| ground.title.contains(word)));
    for ground in grounds {
        counts += part(&format!("pjdfstest on {}", ground.title), || on(ground, &suite))?;
    }
    say(&counts.to_string());
    ensure!(counts.passed > 0, "no test ran");
    ensure!(counts.failed == 0, "{} failed", counts.failed);
    Ok(())
}

/// This process once more, with the binaries that the scene is to use.
fn again(bin_dir: &Path) -> Result<()> {
    let mut command = Command::new(std::env::current_exe().context("this program")?);
    build::run(command.args(std::env::args_os().skip(1)).env(DRIVER, bin_dir.join("hawser-csi")))
}

/// On a thread of its own: entering a sandbox is for a thread's whole life.
fn on(ground: &Ground, suite: &pjdfstest::Suite) -> Result<pjdfstest::Counts> {
    thread::scope(|scope| {
        let run = scope.spawn(|| in_a_sandbox(ground, suite));
        run.join().map_err(|_| anyhow!("the thread of the sandbox panicked"))?
    })
}

fn in_a_sandbox(ground: &Ground, suite: &pjdfstest::Suite) -> Result<pjdfstest::Counts> {
    let sandbox = Sandbox::new();
    let _pool = LoopMount::new(&sandbox, "pool", ground.kind, POOL_BYTES)?;
    let capacity = ["--pool-capacity", "3Gi"].map(str::to_owned);
    let scene = Scene::start_in(sandbox, Flags::process_with_keeper().with(&capacity));
    let caller = scene.caller();
    let refused = |what: &'static str| move |status| anyhow!("{what}: {status:?}");
    let request = of_size(with(create_request("posix"), ground.parameters), VOLUME_BYTES, 0);
    let id = caller.create(request).map_err(refused("create"))?.volume_id;
    caller.stage(&id).map_err(refused("stage"))?;
    caller.publish(&id, "posix").map_err(refused("publish"))?;

    let target = caller.target_path("posix");
    let counts = thread::scope(|scope| {
        let run = scope.spawn(|| suite.run(&target));
        if ground.takeovers {
            say(&format!("{} daemons were killed", kill_daemons(&scene, &run)));
        }
        run.join().map_err(|_| anyhow!("the thread of the suite panicked"))?
    })?;
    caller.unpublish(&id, "posix").map_err(refused("unpublish"))?;
    caller.unstage(&id).map_err(refused("unstage"))?;
    caller.delete(&id).map_err(refused("delete"))?;
    scene.assert_nothing_left();
    Ok(counts)
}

/// Until the suite has ended; how many were killed.
fn kill_daemons<T>(scene: &Scene, suite: &thread::ScopedJoinHandle<'_, T>) -> usize {
    let mut kills = 0;
    while !suite.is_finished() {
        thread::park_timeout(BETWEEN_KILLS);
        if scene.serving_daemons().len() == 1 {
            scene.kill_daemon();
            kills += 1;
        }
    }
    kills
}
