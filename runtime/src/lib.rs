//! The embedded CRI runtime: sandboxes, images, OCI bundles, the native launcher
//! and one shim process per pod, behind CRI v1 messages on a unix socket.
//!
//! The layers, from the clients down to the kernel; each uses only those below it
//! (`xtask/tests/modules.rs` tests that):
//!
//! - `server`: the CRI socket and the connections of exec, attach and port-forward. `start`: what a
//!   runtime does without a call, such as adopting the pods of an earlier runtime.
//! - `calls`: what each CRI call does.
//! - `runtime`: the state that all calls share. It calls up in one case: [`serve`] gives it the
//!   function that it calls when a shim is lost.
//! - `shim_client`: starts the shim of a pod and calls it, through a socket.
//! - `shim`, `launcher`: what a shim does. It starts, reaps and reads the containers of one pod. The
//!   layers above use its messages: their types, and how descriptors go with them.
//! - `spec`: what pods and containers are to be. It decides, and changes nothing. It reads the
//!   image's users and this machine: limits, devices, the sources of mounts, seccomp profiles.
//! - `registry`: images from registries. `images`: the image store. `cni`: networks of pods.
//! - Below all: `disk` (records, mount points, removal of files), `blocking` (work that waits for
//!   the kernel or a disk) and `locks`.
//!
//! Beside the layers are `error`, which contains the errors of others, `reexec` and `fuzzing` (the
//! entry points of fuzz targets). `reexec` starts this program again: as a shim, to unpack a layer
//! or to resolve a name. Beside these, the runtime starts only CNI plugins: a shim starts the containers
//! of its pod and the programs in them, or an OCI runtime that does.
//!
//! Invariant: the runtime knows one pod at a time, as CRI messages describe it. It knows nothing
//! about desired state, volumes or CSI.

mod blocking;
mod calls;
mod cni;
mod disk;
mod error;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod images;
mod launcher;
mod locks;
pub mod reexec;
mod registry;
mod runtime;
mod server;
mod shim;
mod shim_client;
mod spec;
mod start;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use proto::cri::image_service_server::ImageServiceServer;
use proto::cri::runtime_service_server::RuntimeServiceServer;
use proto::deadline::Deadlines;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;

pub use blocking::in_place::while_others_go_on;
use calls::sandbox;
pub use error::Error;
use error::ServeProblem;
pub use images::watch::ImagesWatch;
pub use images::{ImageLimits, offered as offered_images};
pub use locks::Locks;
pub use registry::RegistryConfig;
use server::service::Service;
use server::streaming::Streaming;
pub use server::streaming::spdy_client;
use server::unimplemented::{Explained, Former};
pub use shim::log::LogCeiling;
use start::{adopt, preload};

/// The runtime's directories and settings. All paths are absolute.
#[derive(Debug, Clone)]
pub struct Config {
    /// State of the runtime: images, sandboxes, namespaces. Only one runtime per directory.
    pub root_dir: PathBuf,
    /// OCI image layouts and archives that PullImage imports from.
    pub images_dir: PathBuf,
    /// Directory of network configurations; the first by name is used.
    pub cni_conf_dir: PathBuf,
    /// Directory of CNI plugins.
    pub cni_bin_dir: PathBuf,
    /// libcni's result cache; usually /var/lib/cni.
    pub cni_cache_dir: PathBuf,
    /// `runc`, `crun` or `youki` instead of the native launcher.
    pub oci_runtime: Option<PathBuf>,
    /// Starts containers without CAP_MKNOD if their device rules cannot be enforced (cgroup v2 on a
    /// kernel that refuses the BPF program). Otherwise they do not start.
    pub allow_without_device_control: bool,
    /// Limit of a container's logs, also if the kubelet rotates them; `None`: no limit.
    pub log_ceiling: Option<LogCeiling>,
    /// Control group, absolute within each hierarchy, below which the processes that unpack images
    /// have their groups.
    pub cgroup_root: PathBuf,
    /// Limits of one image.
    pub image_limits: ImageLimits,
    /// How images that are not in `images_dir` are pulled.
    pub registries: RegistryConfig,
    /// Imports everything in `images_dir` at the start and whenever it changes.
    pub preload_images: bool,
}

/// How long a runtime that is ending may still hold its root directory.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// Serves CRI v1 on a new unix socket (0600) at `socket` until `shutdown` is done. Adopts what an
/// earlier runtime on the same root directory left running. When it ends, its pods continue.
///
/// The calling binary must call [`reexec::run_if_asked`] before anything else.
pub async fn serve(
    config: Config,
    socket: &Path,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), Error> {
    let failed = |source| Error::Serve { socket: socket.to_owned(), source };
    let runtime = take_over(&config).await?;
    // We hold the lock on the root directory: no other runtime listens on this socket.
    let listener = listen(socket).map_err(|source| failed(ServeProblem::Listen { source }))?;
    answer(&config, runtime, listener, shutdown).await.map_err(failed)?;
    match std::fs::remove_file(socket) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            Err(failed(ServeProblem::Remove { source }))
        }
        _ => Ok(()),
    }
}

/// Binds a socket at `path`, mode 0600, and replaces an existing one. Its directory keeps other
/// users out until the mode is set.
pub fn listen(path: &Path) -> std::io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// [`serve`] on a socket that the caller has bound and will remove. Early calls wait.
pub async fn serve_on(
    config: Config,
    listener: UnixListener,
    socket: PathBuf,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), Error> {
    let runtime = take_over(&config).await?;
    let answered = answer(&config, runtime, listener, shutdown).await;
    answered.map_err(|source| Error::Serve { socket, source })
}

async fn take_over(config: &Config) -> Result<Arc<runtime::Runtime>, Error> {
    let runtime = open(config).await?;
    adopt::adopt(&runtime).await?;
    adopt::report_network(&runtime);
    Ok(runtime)
}

/// Serves until shutdown.
async fn answer(
    config: &Config,
    runtime: Arc<runtime::Runtime>,
    listener: UnixListener,
    shutdown: impl Future<Output = ()> + Send,
) -> Result<(), ServeProblem> {
    let preloading = config
        .preload_images
        .then(|| tokio::spawn(preload::follow(Arc::clone(&runtime), config.images_dir.clone())));
    let (end, ending) = watch::channel(false);
    let streaming =
        Streaming::start(Arc::clone(&runtime)).await.map_err(|source| ServeProblem::Listen { source })?;
    let service = Service { runtime, streaming, ending };
    let served = tonic::transport::Server::builder()
        .layer(Deadlines)
        .add_service(Explained(RuntimeServiceServer::new(service.clone())))
        .add_service(Explained(ImageServiceServer::new(service)))
        .add_service(Former::<false>)
        .add_service(Former::<true>)
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), async {
            shutdown.await;
            end.send_replace(true);
        })
        .await;
    if let Some(preloading) = preloading {
        preloading.abort();
    }
    served.map_err(ServeProblem::Server)
}

/// Waits for the lock: it is the last thing that an ending process releases.
async fn open(config: &Config) -> Result<Arc<runtime::Runtime>, Error> {
    let deadline = Instant::now() + LOCK_TIMEOUT;
    loop {
        match runtime::Runtime::open(config, sandbox::shim_is_lost) {
            Err(Error::Locked { .. }) if Instant::now() < deadline => tokio::time::sleep(LOCK_PAUSE).await,
            opened => return opened,
        }
    }
}
