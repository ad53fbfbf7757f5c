//! The control groups of daemons that the driver starts itself: one a launch, with the limits
//! that a mount pod would have.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use linux::cgroup::{Cgroup, Hierarchies, Limits};

use crate::model::launch::LaunchKey;
use crate::model::settings::LaunchSettings;

/// Its daemon has as many event loops as its class asks for, at most 64, and a few threads more.
const MAX_TASKS: i64 = 128;
/// The kernel's default, in microseconds.
const CPU_PERIOD: u64 = 100_000;
/// For processes of the group that is to go; its daemon has ended before.
const END: Duration = Duration::from_secs(5);

/// Below which the groups of all daemons are.
#[derive(Debug)]
pub(crate) struct GroupParent {
    path: PathBuf,
    /// As they were last found. Their table is long on a node with many mounts.
    hierarchies: Mutex<Hierarchies>,
}

impl GroupParent {
    /// `path` counts from the root of each hierarchy.
    pub(crate) fn new(path: &Path) -> linux::Result<Self> {
        Ok(Self { path: path.to_path_buf(), hierarchies: Mutex::new(Hierarchies::detect()?) })
    }

    fn known(&self) -> MutexGuard<'_, Hierarchies> {
        self.hierarchies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn of(&self, key: &LaunchKey) -> PathBuf {
        self.path.join(key.as_str())
    }

    /// The launch's group, with its limits; one that is there is used again.
    pub(super) fn make(&self, key: &LaunchKey, limits: &Limits) -> linux::Result<Cgroup> {
        let (path, known) = (self.of(key), self.known().clone());
        let made = match known.create(&path, limits) {
            Ok((group, unmet)) if unmet.is_empty() => return Ok(group),
            // A hierarchy may have been mounted since, or elsewhere.
            other => match Hierarchies::detect()? {
                found if found == known => other,
                found => {
                    *self.known() = found.clone();
                    found.create(&path, limits)
                }
            },
        };
        let (group, unmet) = made?;
        for limit in unmet {
            tracing::warn!(%key, limit, "the daemon runs without this limit");
        }
        Ok(group)
    }

    /// Its absence is a success. What the daemon left in it is killed.
    pub(super) fn remove(&self, key: &LaunchKey) -> linux::Result<()> {
        let hierarchies = self.known().clone();
        Cgroup::find(&hierarchies, &self.of(key)).end(END)
    }
}

/// Those of the class, else those that a mount pod has by default.
pub(super) fn limits(settings: &LaunchSettings, default_memory_bytes: u64) -> Limits {
    let memory = settings.resources.memory_limit_bytes().unwrap_or(default_memory_bytes);
    let cpu_quota = settings.resources.cpu_limit_thousandths().map(|thousandths| {
        let quota = thousandths.saturating_mul(CPU_PERIOD) / 1000;
        i64::try_from(quota).unwrap_or(i64::MAX)
    });
    Limits {
        memory_bytes: Some(i64::try_from(memory).unwrap_or(i64::MAX)),
        cpu_quota,
        cpu_period: cpu_quota.map(|_| CPU_PERIOD),
        pids: Some(MAX_TASKS),
        ..Limits::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::parameters::Resources;

    #[test]
    fn a_group_is_made_in_hierarchies_that_were_mounted_after_the_start() {
        let path = PathBuf::from(format!("/hawser-test-groups-{}", std::process::id()));
        let found = Hierarchies::detect().unwrap();
        assert!(found.has("memory"), "this test needs a memory controller: {found:?}");
        let made = found.ensure_parent(&path).unwrap();
        let parent = GroupParent { path: path.clone(), hierarchies: Mutex::new(Hierarchies::default()) };
        let key = LaunchKey::parse("0123456789abcdef0123456789abcdef").unwrap();
        parent.make(&key, &limits(&LaunchSettings::default(), 64 << 20)).unwrap();
        let dir = found.dir("memory", &parent.of(&key)).unwrap();
        assert!(dir.is_dir());
        parent.remove(&key).unwrap();
        assert!(!dir.exists());
        assert_eq!(linux::cgroup::remove_dirs(&made), Vec::<PathBuf>::new());
    }

    #[test]
    fn the_class_limits_the_group_and_without_it_the_default_does() {
        let mut settings = LaunchSettings::default();
        let default = limits(&settings, 512 << 20);
        assert_eq!((default.memory_bytes, default.cpu_quota), (Some(512 << 20), None));
        settings.resources = Resources {
            memory_limit: Some("64Mi".into()),
            cpu_limit: Some("250m".into()),
            ..Resources::default()
        };
        let given = limits(&settings, 512 << 20);
        assert_eq!((given.memory_bytes, given.cpu_quota), (Some(64 << 20), Some(25_000)));
    }
}
