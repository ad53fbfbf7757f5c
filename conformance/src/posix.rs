//! Suite `posix`: other people's tests of file systems, in volumes of each data path, on pools of each file
//! system. The suites are built by the user: no package and no Go module has them.

mod counts;
mod exception;
mod pjdfstest;
mod progress;
mod queue;
mod summary;
mod xfstests;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use ::tests::Sandbox;
use ::tests::csi::scene::{Caller, Flags, Scene, create_request, mounted, retried};
use ::tests::csi::snapshots::{of_size, with};
use ::tests::loop_device::{FileSystem, LoopMount};
use ::tests::subvolume;
use anyhow::{Context, Result, anyhow, bail};
use xtask::build;
use xtask::foreign::debian_program;
use xtask::progress::{complain, part, say};

use self::counts::Counts;
use self::progress::Progress;
use self::summary::Summary;
pub(super) use self::xfstests::mounts::{COMMAND as MOUNT_COMMAND, run as mount};

/// Set for the process that runs the suites: the driver, which the other binaries are beside.
const DRIVER: &str = "CARGO_BIN_EXE_hawser-csi";
/// Sparse: room for the volumes of [`XFSTESTS_AT_ONCE`].
const POOL_BYTES: u64 = 48 << 30;
const POOL_CAPACITY: &str = "40Gi";
const VOLUME_BYTES: i64 = 4 << 30;
/// How many processes of xfstests run, each with two volumes. Its tests sleep and wait for the disk.
const XFSTESTS_AT_ONCE: usize = 4;
/// Between two kills, where the volume's daemons are killed meanwhile.
const BETWEEN_KILLS: Duration = Duration::from_millis(700);
/// Without the end of a script or of fsx, before the volume's connection is aborted. fsx takes a quarter of
/// this on a machine that does something else as well.
const STALL_TIMEOUT: Duration = Duration::from_secs(600);

/// Where the user has built the suites.
#[derive(Debug, clap::Args)]
pub(super) struct Built {
    /// Of suite `posix`: the directory in which pjdfstest was built
    #[arg(long, value_name = "DIR")]
    pjdfstest: Option<PathBuf>,
    /// Of suite `posix`: the directory in which xfstests was built; results are left in its `results`
    #[arg(long, value_name = "DIR")]
    xfstests: Option<PathBuf>,
    /// Of suite `posix`: only scripts and tests whose name contains this
    #[arg(long, value_name = "NAME")]
    tests: Option<String>,
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
/// The volume is a subvolume with a quota group: the default of such a pool. ext4 and XFS have such quotas in kernels
/// with CONFIG_QUOTA alone.
const PASSING_WITH_QUOTA: &[(&str, &str)] = &[("dataPath", "passthrough"), ("capacity", "kernel")];

const GROUNDS: [Ground; 14] = [
    ground("ext4, by the daemon", FileSystem::Ext4, BY_DAEMON, false),
    ground("ext4, passing through", FileSystem::Ext4, PASSING, false),
    ground("xfs, by the daemon", FileSystem::Xfs, BY_DAEMON, false),
    ground("xfs, passing through", FileSystem::Xfs, PASSING, false),
    ground("btrfs, by the daemon", FileSystem::Btrfs, BY_DAEMON, false),
    ground("btrfs, passing through", FileSystem::Btrfs, PASSING_WITH_QUOTA, false),
    ground("ext4, with the writeback cache", FileSystem::Ext4, WRITING_BACK, false),
    ground("ext4, by the daemon, with takeovers", FileSystem::Ext4, BY_DAEMON, true),
    ground("ext4, passing through, with takeovers", FileSystem::Ext4, PASSING, true),
    ground("xfs, by the daemon, with takeovers", FileSystem::Xfs, BY_DAEMON, true),
    ground("xfs, passing through, with takeovers", FileSystem::Xfs, PASSING, true),
    ground("btrfs, by the daemon, with takeovers", FileSystem::Btrfs, BY_DAEMON, true),
    ground("btrfs, passing through, with takeovers", FileSystem::Btrfs, PASSING_WITH_QUOTA, true),
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
    let names = built.tests.as_deref();
    let pjdfstest = built.pjdfstest.as_deref().map(|dir| pjdfstest::Suite::open(dir, names)).transpose()?;
    let xfstests = built.xfstests.as_deref().map(|dir| xfstests::Suite::open(dir, names)).transpose()?;
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
    let mut summary = Summary::default();
    if let Some(suite) = pjdfstest.as_ref().filter(|suite| suite.len() > 0) {
        let run = |scene: &Scene, ground: &Ground| run_pjdfstest(suite, scene, ground);
        on_each("pjdfstest", &grounds, &run, &mut summary);
    }
    if let Some(suite) = xfstests.as_ref().filter(|suite| suite.len() > 0) {
        if names.is_none() {
            on_each("fsx", &grounds, &|scene, ground| run_fsx(suite, scene, ground), &mut summary);
        }
        // Its tests unmount the volumes, so that takeovers would find none.
        let fresh: Vec<&Ground> = grounds.into_iter().filter(|ground| !ground.takeovers).collect();
        on_each("xfstests", &fresh, &|scene, ground| run_xfstests(suite, scene, ground), &mut summary);
    }
    say(&summary.to_string());
    summary.judge()
}

/// All grounds, also after one has failed.
fn on_each(suite: &'static str, grounds: &[&Ground], run: Run<'_>, summary: &mut Summary) {
    for ground in grounds {
        let started = Instant::now();
        let counts = part(&format!("{suite} on {}", ground.title), || on(ground, run));
        if let Err(error) = &counts {
            complain(&format!("error: {error:#}"));
        }
        summary.add(suite, ground.title, started.elapsed(), counts.ok());
    }
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
    // Its limits are those of an idle machine. A suite's own limits end what hangs.
    sandbox.switch_fuse_guard_off();
    let pool = LoopMount::new(&sandbox, "pool", ground.kind, POOL_BYTES)?;
    if ground.parameters == PASSING_WITH_QUOTA {
        subvolume::enable_quotas(pool.dir())?;
    }
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
    let progress = Progress::new(format!("pjdfstest on {}", ground.title), "scripts", suite.len());
    in_a_published_volume(scene, ground, &progress, |volume| suite.run(volume, ground.title, &progress))
}

fn run_fsx(suite: &xfstests::Suite, scene: &Scene, ground: &Ground) -> Result<Counts> {
    let progress = Progress::new(format!("fsx on {}", ground.title), "runs", xfstests::FSX_RUNS.len());
    in_a_published_volume(scene, ground, &progress, |volume| suite.run_fsx(volume, &progress))
}

fn in_a_published_volume(
    scene: &Scene,
    ground: &Ground,
    progress: &Progress,
    run: impl FnOnce(&Path) -> Result<Counts> + Send,
) -> Result<Counts> {
    let caller = scene.caller();
    let id = create(&caller, ground, "posix")?;
    caller.stage(&id).map_err(refused("stage"))?;
    caller.publish(&id, "posix").map_err(refused("publish"))?;

    let target = caller.target_path("posix");
    let counts = thread::scope(|scope| {
        let run = scope.spawn(|| run(&target));
        let kills = accompany(scene, ground, progress, &target, &|| run.is_finished())?;
        if ground.takeovers {
            say(&format!("{kills} daemons were killed"));
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
    let caller = scene.caller();
    let pair = |number: usize| -> Result<[String; 2]> {
        Ok([
            create(&caller, ground, &format!("test-{number}"))?,
            create(&caller, ground, &format!("scratch-{number}"))?,
        ])
    };
    let ids = (1..=XFSTESTS_AT_ONCE.min(suite.len())).map(pair).collect::<Result<Vec<_>>>()?;
    let progress = Progress::new(format!("xfstests on {}", ground.title), "tests", suite.len());
    let counts = suite.run(scene, &ids, ground.title, &progress)?;
    for id in ids.iter().flatten() {
        caller.delete(id).map_err(refused("delete"))?;
    }
    Ok(counts)
}

/// Until the suite has ended: kills the ground's daemons, if it has takeovers, and aborts the connection of a
/// suite that makes no progress. How many daemons were killed.
fn accompany(
    scene: &Scene,
    ground: &Ground,
    progress: &Progress,
    volume: &Path,
    is_finished: &dyn Fn() -> bool,
) -> Result<usize> {
    let (mut kills, mut is_aborted) = (0, false);
    while !is_finished() {
        thread::park_timeout(BETWEEN_KILLS);
        if ground.takeovers && !is_aborted && scene.serving_daemons().len() == 1 {
            scene.kill_daemon();
            kills += 1;
        }
        if !is_aborted && progress.since_the_last() > STALL_TIMEOUT {
            complain(&format!("no progress in {STALL_TIMEOUT:?}: the volume's connection is aborted"));
            if let Some(mount) = mounted(volume) {
                linux::mount::abort_fuse(&scene.sandbox.path("fusectl"), mount.minor)?;
            }
            is_aborted = true;
        }
    }
    Ok(kills)
}
