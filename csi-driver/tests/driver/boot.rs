//! Where the driver keeps what ends with the machine's boot.

use std::fs;
use std::path::PathBuf;

use tests::csi::scene::Scene;

/// The directory of this boot.
pub(crate) fn dir(scene: &Scene) -> PathBuf {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    scene.sandbox.path("state/boots").join(id.trim())
}

/// The file of a volume's stage and targets.
pub(crate) fn journal_path(scene: &Scene, volume_id: &str) -> PathBuf {
    dir(scene).join(format!("{volume_id}.jsonl"))
}

/// What counts of its text, the last line; empty when there is none.
pub(crate) fn journal(scene: &Scene, volume_id: &str) -> String {
    let text = fs::read_to_string(journal_path(scene, volume_id)).unwrap_or_default();
    text.lines().next_back().unwrap_or_default().to_owned()
}
