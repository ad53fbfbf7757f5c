//! Settings of pulls from registries.

use std::path::PathBuf;
use std::time::Duration;

use super::proxy::Proxies;

/// As flags of `hawser-runtime` and `hawser-kubelet run`.
#[derive(Debug, Clone, clap::Args)]
pub struct RegistryConfig {
    /// Directory with settings of registries, in containerd's form: DIR/REGISTRY/hosts.toml
    #[arg(long, value_name = "DIR", default_value = "/etc/hawser/certs.d")]
    pub registry_config: PathBuf,
    /// Seconds without a byte from a registry after which a pull fails
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub image_pull_idle_seconds: u64,
}

impl RegistryConfig {
    pub(crate) fn idle(&self) -> Duration {
        Duration::from_secs(self.image_pull_idle_seconds)
    }

    /// Those of the environment, as with containerd.
    pub(super) fn proxies(&self) -> Proxies {
        Proxies::read(|name| std::env::var(name).ok())
    }
}
