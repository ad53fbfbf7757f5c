//! Suite `posix`: other people's tests of file systems, in volumes of each data path, on pools of each file
//! system. The suites are built by the user: no package and no Go module has them.

mod counts;
mod exception;
mod pjdfstest;
mod xfstests;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use ::tests::Sandbox;
use ::tests::csi::scene::{Caller, Flags, Scene, create_request, retried};
use ::tests::csi::snapshots::{of_size, with};
use ::tests::loop_device::{FileSystem, LoopMount};
use anyhow::{Context, Result, anyhow, bail, ensure};
use xtask::build;
use xtask::foreign::debian_program;
use xtask::progress::{complain, part, say};

use self::counts::Counts;
pub(super) use self::xfstests::mounts::{COMMAND as MOUNT_COMMAND, run as mount};

/// Set for the process that runs the suites: the driver, which the other binaries are beside.
const DRIVER: &str = "CARGO_BIN_EXE_hawser-csi";
/// Sparse.
const POOL_BYTES: u64 = 12 << 30;
const POOL_CAPACITY: &str = "10Gi";
const VOLUME_BYTES: i64 = 4 << 30;
/// Between two kills, where the volume's daemons are killed meanwhile.
const BETWEEN_KILLS: Duration = Duration::from_millis(700);

/// Where the user has built the suites.
#[derive(Debug, clap::Args)]
pub(super) struct Built {
    /// Of suite `posix`: the directory in which pjdfstest was built
    #[arg(long, value_name = "DIR")]
    pjdfstest: Option<PathBuf>,
    /// Of suite `posix`: the directory in which xfstests was built; results are left in its `results`
    #[arg(long, value_name = "DIR")]
    xfstests: Option<PathBuf>,
}

const WHAT_TO_INSTALL: &str = "suite posix needs --pjdfstest DIR or --xfstests DIR, or both: directories in which you have \
built pjdfstest and xfstests from their sources, as their READMEs describe. The Debian packages for that are autoconf, \
automake, gcc and make; for xfstests also libtool-bin, uuid-dev, libacl1-dev, libaio-dev, libattr1-dev and xfslibs-dev, \
and for more of its tests libcap-dev, libgdbm-dev, quota and dbench";

/// A volume to test.
struct Ground {
    title: &'static str,
    kind: FileSystem,
    parameters: &'static [(&'static str, &'static str)],
    /// Its daemons are killed, and others follow.
    takeovers: bool,
}

const BY_DAEMON: &[(&str, &str)] = &[("dataPath", "daemon"), ("capacity", "daemon")];
const WRITING_BACK: &[(&str, &str)] =
    &[("dataPath", "daemon"), ("capacity", "daemon"), ("writebackCache", "true")];
const PASSING: &[(&str, &str)] = &[("dataPath", "passthrough"), ("capacity", "none")];

const GROUNDS: [Ground; 14] = [
    ground("ext4, by the daemon", FileSystem::Ext4, BY_DAEMON, false),
    ground("ext4, passing through", FileSystem::Ext4, PASSING, false),
    ground("xfs, by the daemon", FileSystem::Xfs, BY_DAEMON, false),
    ground("xfs, passing through", FileSystem::Xfs, PASSING, false),
    ground("btrfs, by the daemon", FileSystem::Btrfs, BY_DAEMON, false),
    ground("btrfs, passing through", FileSystem::Btrfs, PASSING, false),
    ground("ext4, with the writeback cache", FileSystem::Ext4, WRITING_BACK, false),
    ground("ext4, by the daemon, with takeovers", FileSystem::Ext4, BY_DAEMON, true),
    ground("ext4, passing through, with takeovers", FileSystem::Ext4, PASSING, true),
    ground("xfs, by the daemon, with takeovers", FileSystem::Xfs, BY_DAEMON, true),
    ground("xfs, passing through, with takeovers", FileSystem::Xfs, PASSING, true),
    ground("btrfs, by the daemon, with takeovers", FileSystem::Btrfs, BY_DAEMON, true),
    ground("btrfs, passing through, with takeovers", FileSystem::Btrfs, PASSING, true),
    ground("ext4, with the writeback cache, with takeovers", FileSystem::Ext4, WRITING_BACK, true),
];

const fn ground(
    title: &'static str,
    kind: FileSystem,
    parameters: &'static [(&'static str, &'static str)],
    takeovers: bool,
) -> Ground {
    Ground { title, kind, parameters, takeovers }
}

/// A suite on a ground.
type Run<'a> = &'a (dyn Fn(&Scene, &Ground) -> Result<Counts> + Sync);

/// `only`: of grounds whose title contains this.
pub(super) fn run(built: &Built, only: Option<&str>) -> Result<()> {
    if built.pjdfstest.is_none() && built.xfstests.is_none() {
        bail!(WHAT_TO_INSTALL);
    }
    let pjdfstest = built.pjdfstest.as_deref().map(pjdfstest::Suite::open).transpose()?;
    let xfstests = built.xfstests.as_deref().map(xfstests::Suite::open).transpose()?;
    for (program, package) in
        [("mkfs.ext4", "e2fsprogs"), ("mkfs.xfs", "xfsprogs"), ("mkfs.btrfs", "btrfs-progs")]
    {
        debian_program(program, package)?;
    }
    if std::env::var_os(DRIVER).is_none() {
        return again(&part("build the static binaries", build::products)?);
    }
    let grounds: Vec<&Ground> =
        GROUNDS.iter().filter(|ground| only.is_none_or(|word| ground.title.contains(word))).collect();
    let mut all = Vec::new();
    if let Some(suite) = &pjdfstest {
        all.push(on_each("pjdfstest", &grounds, &|scene, ground| run_pjdfstest(suite, scene, ground)));
    }
    if let Some(suite) = &xfstests {
        all.push(on_each("fsx", &grounds, &|scene, ground| run_fsx(suite, scene, ground)));
        // Its tests unmount the volumes, so that takeovers would find none.
        let fresh: Vec<&Ground> = grounds.into_iter().filter(|ground| !ground.takeovers).collect();
        all.push(on_each("xfstests", &fresh, &|scene, ground| run_xfstests(suite, scene, ground)));
    }
    all.into_iter().collect()
}

/// All grounds, also after one has failed.
fn on_each(suite: &str, grounds: &[&Ground], run: Run<'_>) -> Result<()> {
    let (mut counts, mut failed) = (Counts::default(), Vec::new());
    for ground in grounds {
        let title = format!("{suite} on {}", ground.title);
        match part(&title, || on(ground, run)) {
            Ok(more) => {
                say(&format!("{title}: {more}"));
                counts += more;
            }
            Err(error) => {
                complain(&format!("error: {error:#}"));
                failed.push(title);
            }
        }
    }
    say(&format!("{suite}: {counts}"));
    ensure!(failed.is_empty(), "failed: {}", failed.join("; "));
    ensure!(counts.passed > 0 || grounds.is_empty(), "{suite}: nothing ran");
    ensure!(counts.failed == 0, "{suite}: {} failed", counts.failed);
    Ok(())
}

/// This process once more, with the binaries that the scene is to use.
fn again(bin_dir: &Path) -> Result<()> {
    let mut command = Command::new(std::env::current_exe().context("this program")?);
    build::run(command.args(std::env::args_os().skip(1)).env(DRIVER, bin_dir.join("hawser-csi")))
}

/// On a thread of its own: entering a sandbox is for a thread's whole life.
fn on(ground: &Ground, run: Run<'_>) -> Result<Counts> {
    thread::scope(|scope| {
        let run = scope.spawn(|| in_a_sandbox(ground, run));
        run.join().map_err(|_| anyhow!("the thread of the sandbox panicked"))?
    })
}

fn in_a_sandbox(ground: &Ground, run: Run<'_>) -> Result<Counts> {
    let sandbox = Sandbox::new();
    let _pool = LoopMount::new(&sandbox, "pool", ground.kind, POOL_BYTES)?;
    let capacity = ["--pool-capacity", POOL_CAPACITY].map(str::to_owned);
    let scene = Scene::start_in(sandbox, Flags::process_with_keeper().with(&capacity));
    let counts = run(&scene, ground)?;
    scene.assert_nothing_left();
    Ok(counts)
}

fn create(caller: &Caller, ground: &Ground, name: &str) -> Result<String> {
    let request = of_size(with(create_request(name), ground.parameters), VOLUME_BYTES, 0);
    caller.create(request).map(|volume| volume.volume_id).map_err(refused("create"))
}

/// What the driver answered to a call.
fn refused(call: &'static str) -> impl Fn(tonic::Status) -> anyhow::Error {
    move |status| anyhow!("{call}: {:?}: {}", status.code(), status.message())
}

fn run_pjdfstest(suite: &pjdfstest::Suite, scene: &Scene, ground: &Ground) -> Result<Counts> {
    in_a_published_volume(scene, ground, |volume| suite.run(volume, ground.title))
}

fn run_fsx(suite: &xfstests::Suite, scene: &Scene, ground: &Ground) -> Result<Counts> {
    in_a_published_volume(scene, ground, |volume| suite.run_fsx(volume))
}

fn in_a_published_volume(
    scene: &Scene,
    ground: &Ground,
    run: impl FnOnce(&Path) -> Result<Counts> + Send,
) -> Result<Counts> {
    let caller = scene.caller();
    let id = create(&caller, ground, "posix")?;
    caller.stage(&id).map_err(refused("stage"))?;
    caller.publish(&id, "posix").map_err(refused("publish"))?;

    let target = caller.target_path("posix");
    let counts = thread::scope(|scope| {
        let run = scope.spawn(|| run(&target));
        if ground.takeovers {
            say(&format!("{} daemons were killed", kill_daemons(scene, &run)));
        }
        run.join().map_err(|_| anyhow!("the thread of the suite panicked"))?
    })?;
    // A takeover may be under way.
    retried(scene, "unpublish", || caller.unpublish(&id, "posix"));
    retried(scene, "unstage", || caller.unstage(&id));
    retried(scene, "delete", || caller.delete(&id));
    Ok(counts)
}

fn run_xfstests(suite: &xfstests::Suite, scene: &Scene, ground: &Ground) -> Result<Counts> {
    // The time limit of the suite ends what hangs. The guard would also end what is slow.
    scene.sandbox.switch_fuse_guard_off();
    let caller = scene.caller();
    let ids = [create(&caller, ground, "test")?, create(&caller, ground, "scratch")?];
    let counts = suite.run(scene, ids.each_ref().map(String::as_str), ground.title)?;
    for id in &ids {
        caller.delete(id).map_err(refused("delete"))?;
    }
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
