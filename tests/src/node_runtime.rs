//! The CRI runtime of a test's node: the one inside the kubelet, or a containerd of the node's own.
//!
//! Invariant: a containerd lives in the sandbox of its node. Its files are below the node's directories, /run and
//! /var/lib are private to the sandbox's mount namespace, and its shims are in the sandbox's control group.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::containerd::{Containerd, Settings, hide_run_and_var_lib};
use crate::image::{Program, write_archive_with_arguments};
use crate::{Sandbox, binaries};

/// `containerd`: every node of this test run uses one.
pub const VARIABLE: &str = "HAWSER_TEST_NODE_RUNTIME";
/// The test whose nodes use containerd without the variable.
const TEST_OVER_CONTAINERD: &str = "over_containerd";
/// The directory of a node's containerd.
pub(crate) const CONTAINERD: &str = "c";
/// Of the process that holds the namespaces of a pod.
const PAUSE_IMAGE: &str = "hawser.dev/pause:test";
/// Names of Debian's packages too.
const PROGRAM: &str = "containerd";
const OCI_RUNTIME: &str = "runc";

/// What answers the kubelet's CRI calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeRuntime {
    Embedded,
    /// Debian's, with runc.
    Containerd,
}

impl Default for NodeRuntime {
    fn default() -> Self {
        let chosen = std::env::var(VARIABLE).ok();
        assert!(
            chosen.as_deref().is_none_or(|name| name == PROGRAM),
            "{VARIABLE}={}: only {PROGRAM} is known",
            chosen.unwrap_or_default()
        );
        let own = std::env::current_exe().unwrap_or_default();
        let is_over_containerd =
            own.file_name().is_some_and(|name| name.to_string_lossy().starts_with(TEST_OVER_CONTAINERD));
        if chosen.is_some() || is_over_containerd { Self::Containerd } else { Self::Embedded }
    }
}

impl NodeRuntime {
    /// Its directory on a node's disk: images and writable layers are in it.
    pub fn dir(self) -> &'static str {
        match self {
            Self::Embedded => "k/hawser/runtime",
            Self::Containerd => CONTAINERD,
        }
    }
}

/// A containerd that serves one node.
#[derive(Debug)]
pub(crate) struct NodeContainerd {
    daemon: Containerd,
    ctr: PathBuf,
}

impl NodeContainerd {
    /// Up, with the image that it needs itself. Its root, state and socket are in `dir`, which exists; `network` is
    /// its directory of CNI configurations.
    pub(crate) fn start(sandbox: &Sandbox, dir: &Path, plugins: &Path, network: &Path) -> Result<Self> {
        debian(OCI_RUNTIME)?;
        let (program, ctr) = (debian(PROGRAM)?, debian("ctr")?);
        hide_run_and_var_lib()?;
        let settings = Settings {
            program: &program,
            plugins,
            network,
            pause_image: PAUSE_IMAGE,
            snapshotter: "overlayfs",
            registries: None,
        };
        let this = Self { daemon: Containerd::start(dir, &settings)?, ctr };
        let archive = sandbox.path("i/pause.tar");
        let binary = binaries::find("demo-app")?;
        // By its name, a pod's own process is none of demo-app's.
        let pause = Program { image: PAUSE_IMAGE, binary: &binary, path: "pause", directories: &[] };
        write_archive_with_arguments(&pause, &["sleep", "forever"], &archive)?;
        this.import(&archive)?;
        Ok(this)
    }

    /// Makes the image of an archive known to pods.
    pub(crate) fn import(&self, archive: &Path) -> Result<()> {
        self.daemon.import(&self.ctr, archive)
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.daemon.socket()
    }

    pub(crate) fn kill(&mut self) -> Result<()> {
        self.daemon.kill()
    }

    pub(crate) fn start_again(&mut self) -> Result<()> {
        self.daemon.start_again()
    }

    pub(crate) fn log_tail(&self) -> String {
        self.daemon.log_tail()
    }

    pub(crate) fn stop(self) -> Result<()> {
        self.daemon.stop()
    }
}

fn debian(program: &str) -> Result<PathBuf> {
    let directories = ["/usr/bin", "/usr/sbin", "/bin", "/sbin"].map(Path::new);
    let found = directories.iter().map(|dir| dir.join(program)).find(|path| path.is_file());
    found.with_context(|| format!("no {program}: install Debian's packages {PROGRAM} and {OCI_RUNTIME}"))
}
