//! The parts of a driver, and how they refer to each other.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};

use crate::backend::VolumeBackend;
use crate::backend::local::{Pool, PoolSettings};
use crate::config::{self, Config, ConfigError, KeeperBinary, KeeperStart, LauncherKind, Mode};
use crate::daemon::keeper::process::KeeperProcess;
use crate::daemon::keeper::{InProcess, Keeper};
use crate::daemon::launcher::Launcher;
use crate::daemon::launcher::daemon_log::DaemonLogs;
use crate::daemon::launcher::group::GroupParent;
use crate::daemon::launcher::manifest::ManifestLauncher;
use crate::daemon::launcher::process::ProcessLauncher;
use crate::daemon::waits::Waits;
use crate::daemon::warm::WarmDaemons;
use crate::daemon::watch::{DaemonWatch, Ended};
use crate::engine::admission::Admission;
use crate::engine::attach::Attachments;
use crate::engine::daemons::Daemons;
use crate::engine::deaths::Deaths;
use crate::engine::expand::Expansion;
use crate::engine::forgetting::MountPointLists;
use crate::engine::hang::HangWatch;
use crate::engine::jobs::Jobs;
use crate::engine::locks::Locks;
use crate::engine::parking::Parking;
use crate::engine::probe::Readiness;
use crate::engine::provision::Provisioner;
use crate::engine::publish::Targets;
use crate::engine::reconcile::Reconciler;
use crate::engine::snapshots::Snapshots;
use crate::engine::stage::Stages;
use crate::engine::statistics::Statistics;
use crate::error::{Result, Step, chain};
use crate::journal::{self, Journal};
use crate::kernel::bounded::{OneEach, Shared};
use crate::kernel::host_path::HostPaths;
use crate::model::counts::Counts;
use crate::model::topology::Topology;

/// The program of the keeper.
const KEEPER: &str = "hawser-keeper";

#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) config: Arc<Config>,
    pub(crate) journal: Arc<Journal>,
    pub(crate) backend: Arc<dyn VolumeBackend>,
    pub(crate) counts: Arc<Counts>,
    /// Copies that continue after their calls.
    pub(crate) jobs: Jobs,
    pub(crate) locks: Locks,
    pub(crate) admission: Admission,
    pub(crate) daemons: Arc<Daemons>,
    pub(crate) stages: Arc<Stages>,
    pub(crate) targets: Arc<Targets>,
    pub(crate) snapshots: Arc<Snapshots>,
    pub(crate) attachments: Arc<Attachments>,
    pub(crate) provisioner: Arc<Provisioner>,
    pub(crate) statistics: Arc<Statistics>,
    pub(crate) expansion: Expansion,
    pub(crate) readiness: Arc<Readiness>,
    pub(crate) reconciler: Arc<Reconciler>,
    pub(crate) hang_watch: Arc<HangWatch>,
    pub(crate) mount_point_lists: Arc<MountPointLists>,
}

/// What the driver learns of other processes.
pub(crate) struct Notices {
    /// For [`crate::engine::takeover::serve`].
    pub(crate) ended_daemons: UnboundedReceiver<Ended>,
    /// For [`crate::engine::renewal::serve`].
    pub(crate) renewed_keepers: UnboundedReceiver<()>,
}

impl Driver {
    /// Opens the journal. Repairs nothing: that is [`Reconciler::reconcile`].
    pub(crate) fn open(config: Config, backend: Arc<dyn VolumeBackend>) -> Result<(Self, Notices)> {
        let journal = Arc::new(Journal::open(&config.state_dir)?);
        let paths = Arc::new(HostPaths::new(&config)?);
        let config = Arc::new(config);
        let counts: Arc<Counts> = Arc::default();
        let jobs = Jobs::new(counts.copied_bytes.clone());
        let locks = Locks::new(jobs.clone());
        // syncfs(2) of volumes does not return while their daemon is stuck.
        let flushes = Arc::new(OneEach::default());
        let (daemon_ended, ended_daemons) = mpsc::unbounded_channel();
        let launcher: Arc<dyn Launcher> = launcher(&config)?.into();
        let (renewed, renewed_keepers) = mpsc::unbounded_channel();
        let keeper = keeper(&config, renewed)?;
        let warm = WarmDaemons::new(
            launcher.clone(),
            keeper.clone(),
            config.run_dir.clone(),
            config.start_timeout,
            config.warm_daemons,
        );
        let daemons = Arc::new(Daemons {
            run_dir: config.run_dir.clone(),
            launcher,
            warm: Arc::new(warm.step("prepare warm daemons")?),
            start_timeout: config.start_timeout,
            keeper,
            watch: DaemonWatch::new(counts.clone(), daemon_ended),
            hangs: Arc::default(),
            waits: Waits::default(),
        });
        let stages = Arc::new(Stages {
            journal: journal.clone(),
            backend: backend.clone(),
            paths: paths.clone(),
            daemons: daemons.clone(),
            locks: locks.clone(),
            flushes: flushes.clone(),
            counts: counts.clone(),
            parking: Parking::new(daemons.keeper.clone()),
            deaths: Deaths::default(),
        });
        let targets = Arc::new(Targets {
            journal: journal.clone(),
            paths: paths.clone(),
            daemons: daemons.clone(),
            stages: stages.clone(),
            flushes: flushes.clone(),
        });
        let snapshots = Arc::new(Snapshots {
            journal: journal.clone(),
            backend: backend.clone(),
            locks: locks.clone(),
            jobs: jobs.clone(),
            stages: stages.clone(),
            daemons: daemons.clone(),
            flushes,
            pool_syncs: Shared::default(),
            counts: counts.clone(),
        });
        let attachments = Arc::new(Attachments {
            config: config.clone(),
            journal: journal.clone(),
            locks: locks.clone(),
            stages: stages.clone(),
            counting: Mutex::default(),
        });
        let provisioner = Arc::new(Provisioner {
            journal: journal.clone(),
            backend: backend.clone(),
            locks: locks.clone(),
            jobs: jobs.clone(),
            stages: stages.clone(),
            snapshots: snapshots.clone(),
            attachments: attachments.clone(),
        });
        let statistics = Arc::new(Statistics {
            journal: journal.clone(),
            backend: backend.clone(),
            paths,
            keeper: daemons.keeper.clone(),
            hangs: daemons.hangs.clone(),
            measures: Shared::default(),
        });
        let expansion = Expansion {
            journal: journal.clone(),
            backend: backend.clone(),
            stages: stages.clone(),
            statistics: statistics.clone(),
        };
        let mut dirs: Vec<_> =
            journal::dirs(&config.state_dir).into_iter().map(|dir| ("state directory", dir)).collect();
        dirs.push(("run directory", config.run_dir.clone()));
        let readiness = Arc::new(Readiness::new(backend.clone(), dirs));
        let reconciler = Arc::new(Reconciler {
            journal: journal.clone(),
            backend: backend.clone(),
            daemons: daemons.clone(),
            locks: locks.clone(),
            stages: stages.clone(),
            targets: targets.clone(),
            provisioner: provisioner.clone(),
            snapshots: snapshots.clone(),
        });
        let hang_watch = Arc::new(HangWatch {
            journal: journal.clone(),
            daemons: daemons.clone(),
            stages: stages.clone(),
            locks: locks.clone(),
            counts: counts.clone(),
            deadline: config.daemon_deadline,
        });
        let mount_point_lists = Arc::new(MountPointLists::new(journal.clone(), daemons.clone()));
        let driver = Self {
            config,
            journal,
            backend,
            counts,
            jobs,
            locks,
            admission: Admission::default(),
            daemons,
            stages,
            targets,
            snapshots,
            attachments,
            provisioner,
            statistics,
            expansion,
            readiness,
            reconciler,
            hang_watch,
            mount_point_lists,
        };
        Ok((driver, Notices { ended_daemons, renewed_keepers }))
    }
}

/// The backend that the configuration names. Makes nothing yet.
pub(crate) fn backend(config: &Config) -> Result<Arc<dyn VolumeBackend>> {
    let settings = PoolSettings {
        dir: config.pool.clone(),
        capacity_bytes: config.pool_capacity_bytes,
        overcommit: config.overcommit,
        topology: Topology::OneNode(config.own_segment()),
    };
    Ok(Arc::new(Pool::open(settings, &config.state_dir)?))
}

/// Refuses a controller away from the nodes where volumes can be made.
pub(crate) fn check_mode(mode: Mode, topology: &Topology) -> std::result::Result<(), ConfigError> {
    match topology {
        Topology::OneNode(_) if !mode.has_node() => {
            let reason = "only the node that has the pool can make its volumes: start that node's driver with --mode both";
            Err(config::wrong("--mode", "controller", reason))
        }
        Topology::OneNode(_) | Topology::EveryNode => Ok(()),
    }
}

/// The keeper that the configuration names. Without the program beside the driver's, volumes are served all
/// the same.
fn keeper(config: &Config, renewed: UnboundedSender<()>) -> Result<Arc<dyn Keeper>> {
    let start = match &config.keeper {
        KeeperBinary::None => return Ok(Arc::new(InProcess::default())),
        KeeperBinary::Service => KeeperStart::Elsewhere,
        KeeperBinary::Pod(pod) => KeeperStart::Pod(pod.clone()),
        KeeperBinary::At(binary) => config.keeper_start(binary.clone()),
        KeeperBinary::BesideDriver => {
            let binary = beside_this_program(KEEPER).step("look for the keeper")?;
            let program = config.keeper_program(config.keeper_start(binary.clone()));
            return Ok(match KeeperProcess::start(program, renewed) {
                Ok(keeper) => Arc::new(keeper),
                Err(error) => {
                    tracing::warn!(
                        error = chain(&error),
                        "no keeper: if a volume's daemon ends, its pods get ENOTCONN: put hawser-keeper at {}, name \
                         it with --keeper-binary PATH, or pass `--keeper-binary none` if none is wanted",
                        binary.display()
                    );
                    Arc::new(InProcess::default())
                }
            });
        }
    };
    let keeper = KeeperProcess::start(config.keeper_program(start), renewed);
    Ok(Arc::new(keeper.step("start or connect to the keeper")?))
}

fn beside_this_program(name: &str) -> linux::Result<PathBuf> {
    let own = Path::new("/proc/self/exe");
    let program = std::fs::read_link(own).map_err(|e| linux::Error::at("read link", own, e))?;
    Ok(program.with_file_name(name))
}

/// The launcher that the configuration names.
pub(crate) fn launcher(config: &Config) -> Result<Box<dyn Launcher>> {
    let run_dir = config.run_dir.clone();
    Ok(match config.launcher.clone() {
        LauncherKind::Process { volume_binary, cgroup_root } => {
            let groups = cgroup_root.as_deref().map(GroupParent::new).transpose();
            let groups = groups.step("look for control groups")?;
            let logs = DaemonLogs::new(&run_dir);
            Box::new(ProcessLauncher { volume_binary, run_dir, logs, groups })
        }
        LauncherKind::Manifest { manifests, mount_image } => {
            Box::new(ManifestLauncher { manifests, mount_image, run_dir })
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::topology::Segment;

    #[test]
    fn volumes_of_one_node_have_no_controller_apart_from_it() {
        let one_node = Topology::OneNode(Segment { key: "k".to_owned(), value: "n".to_owned() });
        assert_eq!(
            check_mode(Mode::Controller, &one_node).unwrap_err().to_string(),
            "--mode \"controller\": only the node that has the pool can make its volumes: start that node's driver with --mode both"
        );
        check_mode(Mode::Node, &one_node).unwrap();
        check_mode(Mode::Both, &one_node).unwrap();
        check_mode(Mode::Controller, &Topology::EveryNode).unwrap();
    }
}
