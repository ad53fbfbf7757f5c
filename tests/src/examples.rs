//! The YAML and conflists of `examples/`, as the demo and the tests use them:
//! what a reader copies is what runs.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::binaries::workspace_root;

/// The image of the examples' pods.
pub const DEMO_IMAGE: &str = "hawser.dev/demo-app:demo";
/// The image of the pod whose volume's processes the demo kills.
pub const CHAOS_IMAGE: &str = "hawser.dev/chaos:demo";
/// The image of the mount pods.
pub const VOLUME_IMAGE: &str = "hawser.dev/hawser-volume:demo";
/// The bridge of the example's conflist.
pub const BRIDGE: &str = "hawser0";

/// The text of `examples/<name>`.
pub fn read(name: &str) -> Result<String> {
    let path = workspace_root().join("examples").join(name);
    fs::read_to_string(&path).with_context(|| path.display().to_string())
}

/// The example's conflist with its leases in `leases` instead of /var/lib/cni/networks.
pub fn conflist(leases: &Path) -> Result<String> {
    let mut conflist: Value =
        serde_json::from_str(&read("10-hawser.conflist")?).context("10-hawser.conflist")?;
    let ipam = conflist.pointer_mut("/plugins/0/ipam").context("10-hawser.conflist: no plugins[0].ipam")?;
    ipam["dataDir"] = Value::from(leases.display().to_string());
    serde_json::to_string_pretty(&conflist).context("write the conflist")
}
