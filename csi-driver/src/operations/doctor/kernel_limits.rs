//! Whether the kernel limits the volumes that it should.

use super::{Finding, World, is_whole};
use crate::model::policies::CapacityPolicy;
use crate::model::snapshot_mode::SnapshotMode;

pub(super) fn of_kernel_limits(world: &World) -> Vec<Finding> {
    let mut all = Vec::new();
    let limited = || {
        let volumes = world.volumes.iter().filter_map(|(id, record)| Some((id, record.as_ref().ok()?)));
        volumes.filter(|(_, record)| record.policies().capacity == CapacityPolicy::Kernel)
    };
    if let Some(reason) = &world.data.no_kernel_limits {
        all.extend(
            limited()
                .map(|(id, _)| Finding::new("volume is not limited", id, format!("the pool is {reason}"))),
        );
    }
    let refused = limited().filter(|(_, record)| is_whole(record));
    let refused = refused.filter_map(|(id, _)| Some((id, world.data.not_to_limit.get(id)?)));
    all.extend(refused.map(|(id, why)| {
        let found = format!("no stage succeeds, since {why} while no pod uses it");
        Finding::new("volume cannot be limited", id, found)
    }));
    if let Some(mode) = world.data.clones_with_kernel_limits {
        let counted = world
            .volumes
            .iter()
            .filter(|(_, record)| record.as_ref().is_ok_and(|r| is_whole(r) && r.lacks_kernel_limit()));
        all.extend(counted.map(|(id, _)| {
            Finding::new("volume is not limited by the kernel", id, steps_to_kernel_limit(mode))
        }));
    }
    if let Some(reason) = world.data.counts_are_wrong.as_ref().filter(|_| limited().next().is_some()) {
        all.push(Finding::new("quota groups are inexact", "pool", reason));
    }
    all
}

/// What an administrator does for a volume that its daemon counts, in a pool with quotas.
fn steps_to_kernel_limit(clones: SnapshotMode) -> String {
    let mode = match clones {
        SnapshotMode::Reflink => String::new(),
        mode => format!(" and the parameter snapshotMode {}", mode.as_str()),
    };
    format!(
        "its daemon counts what it holds, although the pool has quotas: stop its pods, call CreateVolume with \
         it as source{mode} (in Kubernetes: make a claim with its claim as dataSource), start the pods with \
         the new volume, and delete this one"
    )
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::backend::Diagnosis;
    use crate::model::ids::VolumeId;
    use crate::model::name::VolumeName;
    use crate::model::parameters::Parameters;
    use crate::model::policies::{DataPath, Policies};
    use crate::model::records::VolumeRecord;

    #[test]
    fn volumes_that_daemons_count_are_named_where_their_class_would_give_the_kernels_limit() {
        use CapacityPolicy::{Daemon, Kernel, None as Unlimited};
        let record = |name: &str, capacity, data_path, found: Option<CapacityPolicy>| {
            let parameters = Parameters { capacity, data_path, ..Parameters::default() };
            let policies = found.map(|capacity| Policies { data_path: DataPath::Daemon, capacity });
            let name = VolumeName::parse(name).unwrap();
            let id = VolumeId::for_name(&name);
            (id, VolumeRecord { policies, ..VolumeRecord::new(name, 1 << 20, parameters) })
        };
        let named = [
            record("default", None, None, Some(Daemon)),
            record("default of an earlier version", None, None, None),
            record("by the daemon's path", None, Some(DataPath::Daemon), Some(Daemon)),
        ];
        let (id, whole) = record("deleted", None, None, Some(Daemon));
        let deleted = (id, VolumeRecord { deleting: true, ..whole });
        let (id, whole) = record("being filled", None, None, Some(Daemon));
        let unfilled = (id, VolumeRecord { filled: false, ..whole });
        let others = [
            record("limited", None, None, Some(Kernel)),
            record("chosen", Some(Daemon), None, Some(Daemon)),
            record("unlimited", Some(Unlimited), None, Some(Unlimited)),
            deleted,
            unfilled,
        ];
        let ids: BTreeSet<String> = named.iter().map(|(id, _)| id.to_string()).collect();
        let volumes: BTreeMap<_, _> =
            named.into_iter().chain(others).map(|(id, record)| (id, Ok(record))).collect();
        let data = Diagnosis { volumes: volumes.keys().cloned().collect(), ..Diagnosis::default() };
        let mut world = World { volumes, data, ..World::default() };
        assert_eq!(of_kernel_limits(&world), []);
        for (clones, is_mode_named) in [(SnapshotMode::Reflink, false), (SnapshotMode::BlockingCopy, true)] {
            world.data.clones_with_kernel_limits = Some(clones);
            let found = of_kernel_limits(&world);
            assert!(found.iter().all(|f| f.what == "volume is not limited by the kernel"), "{found:?}");
            assert_eq!(found.iter().map(|f| f.object.clone()).collect::<BTreeSet<_>>(), ids);
            let names_mode = |f: &Finding| f.found.contains("snapshotMode blocking-copy");
            assert!(found.iter().all(|f| names_mode(f) == is_mode_named), "{found:?}");
        }
    }
}
