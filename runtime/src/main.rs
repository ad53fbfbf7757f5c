//! `hawser-runtime`: the embedded runtime on a CRI socket of its own, for a real
//! kubelet or crictl.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};

/// How long running system calls may delay the exit.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

/// Container runtime: serves CRI v1 on a unix socket, for kubelet or crictl.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    /// Directory for all state; one runtime per directory
    #[arg(long, default_value = "/var/lib/hawser-runtime")]
    root_dir: PathBuf,
    /// Unix socket to serve CRI on
    #[arg(long, default_value = "/run/hawser-runtime.sock")]
    socket: PathBuf,
    /// Directory with OCI image layouts and archives (*.tar); an image in it is not pulled from a registry
    #[arg(long, default_value = "/var/lib/hawser-images")]
    images: PathBuf,
    /// Directory with CNI network configurations
    #[arg(long, default_value = "/etc/cni/net.d")]
    cni_conf_dir: PathBuf,
    /// Directory with CNI plugins
    #[arg(long, default_value = "/opt/cni/bin")]
    cni_bin_dir: PathBuf,
    /// Directory with cached CNI results
    #[arg(long, default_value = "/var/lib/cni")]
    cni_cache_dir: PathBuf,
    /// Start containers with this OCI runtime (runc, crun, youki) instead of the built-in one
    #[arg(long)]
    oci_runtime: Option<PathBuf>,
    /// Where the kernel refuses to restrict a container's devices, start it without CAP_MKNOD
    #[arg(long, conflicts_with = "oci_runtime")]
    allow_without_device_control: bool,
    /// Size in bytes at which the runtime itself rotates a log file; 0: never
    #[arg(long, value_name = "BYTES", default_value_t = 64 << 20)]
    log_ceiling: u64,
    /// Number of log files that the runtime keeps per container, including the current one
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(2..))]
    log_ceiling_files: u16,
    /// Leave the images of --images out of ImageStatus and ListImages until a client pulls them
    #[arg(long)]
    no_preload: bool,
    #[command(flatten)]
    image_limits: runtime::ImageLimits,
    #[command(flatten)]
    registries: runtime::RegistryConfig,
    /// Append finished spans to this file, one JSON object a line
    #[arg(long)]
    trace_file: Option<PathBuf>,
    /// What to log to stderr, in the syntax of RUST_LOG
    #[arg(long, default_value = "info")]
    log: String,
}

fn main() -> ExitCode {
    if let Some(code) = runtime::reexec::run_if_asked() {
        return code;
    }
    match run(Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        #[expect(clippy::print_stderr, reason = "the only place that reports why it ended")]
        Err(error) => {
            eprintln!("hawser-runtime: {}", trace::escaped(&linux::chain(error.as_ref())));
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> anyhow::Result<()> {
    if !is_root() {
        anyhow::bail!("must run as root: it makes namespaces, mounts and cgroups");
    }
    trace::init("hawser-runtime", &args.log, args.trace_file.as_deref()).context("set up logging")?;
    let config = runtime::Config {
        root_dir: args.root_dir,
        images_dir: args.images,
        cni_conf_dir: args.cni_conf_dir,
        cni_bin_dir: args.cni_bin_dir,
        cni_cache_dir: args.cni_cache_dir,
        oci_runtime: args.oci_runtime,
        // Pods name their own groups; there is none above all of them.
        cgroup_root: PathBuf::from("/"),
        image_limits: args.image_limits,
        registries: args.registries,
        preload_images: !args.no_preload,
        allow_without_device_control: args.allow_without_device_control,
        log_ceiling: (args.log_ceiling > 0)
            .then(|| runtime::LogCeiling { bytes: args.log_ceiling, files: args.log_ceiling_files.into() }),
    };
    let tokio = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("start the runtime's threads")?;
    let served = tokio.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
        let shutdown = async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        runtime::serve(config, &args.socket, shutdown).await.context("serve")
    });
    // Counts of files, and calls of a disk that does not answer, must not delay the exit.
    tokio.shutdown_timeout(SHUTDOWN_TIMEOUT);
    served
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}
