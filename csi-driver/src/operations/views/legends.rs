//! What the columns and states of the tables mean, for `--help`.

pub(super) const VOLUMES: &str = "\
Columns of the table:
  ID        the volume handle in the PersistentVolume
  NAME      the name in CreateVolume; the provisioner gives the PersistentVolume the same name
  STATE     see below; with a percentage while data are copied into the volume
  CAPACITY  its size
  TARGETS   the number of pods that it is published for
  DAEMON    the process id of its daemon

States:
  unstaged    not in use on this node
  parked      not in use; its daemon still runs, so that the next pod starts sooner
  staging     NodeStageVolume has begun and is not finished
  staged      served, and published for no pod
  published   served, and published for pods
  dead        staged, and its daemon has ended
  hung        staged, and its daemon does not answer: the pods wait
  filling     data are copied from a snapshot or from another volume
  deleting    DeleteVolume has begun and is not finished
  unreadable  its journal entry cannot be read; -o json shows the reason";

pub(super) const SNAPSHOTS: &str = "\
Columns of the table:
  ID      the snapshot handle in the VolumeSnapshotContent
  NAME    the name in CreateSnapshot
  STATE   see below; with a percentage while data are copied
  USED    the size of its data
  PAUSE   how long the volume's writers waited for it
  AGE     the time since it was made
  SOURCE  the id of its volume

States:
  begun       CreateSnapshot has begun, and nothing is copied yet
  copying     a blocking copy runs
  ready       complete: volumes can be made from it
  failed      it has no data; -o json shows the reason
  deleting    DeleteSnapshot has begun and is not finished
  unreadable  its journal entry cannot be read; -o json shows the reason";

pub(super) const MOUNTS: &str = "\
Columns of the table, one row for each mount:
  VOLUME           the id of the volume
  STATE            see below
  DAEMON           the daemon of this mount: serves, hung (it does not answer) or dead
  PID              its process id
  SINCE            the time since it began to serve
  TAKEOVERS        how often another daemon has continued the connection since the stage
  HOLDERS          which programs hold the connection: daemon, driver, keeper. If the daemon
                   alone can hold it, the reason follows, and the daemon's end is the mount's end
  NEEDS NEW STAGE  features of the daemon's program that need another NodeStageVolume
  MODE             ro (read-only) or rw
  DATA PATH        where reads and writes go: through the daemon, or past it (passthrough)
  LIMITED BY       what enforces the capacity: daemon, kernel, none
  CONNECTION       the number in /sys/fs/fuse/connections
  PATH             the mount point

States:
  staged     where NodeStageVolume mounted the volume
  published  where NodePublishVolume mounted it for a pod
  subpath    where kubelet mounted a part of it (subPath) for a pod
  unknown    the journal does not name this mount: run hawser-csi doctor";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operations::views::Row;
    use proto::admin::{Mount, Snapshot, Volume};

    #[test]
    fn every_column_has_its_line_in_the_order_of_the_table() {
        for (legend, headings) in
            [(VOLUMES, Volume::HEADINGS), (SNAPSHOTS, Snapshot::HEADINGS), (MOUNTS, Mount::HEADINGS)]
        {
            let (columns, states) = legend.split_once("\n\nStates:\n").unwrap();
            let is_first = |line: &&str| line.starts_with("  ") && !line.starts_with("   ");
            let entry = |line: &'static str| line.trim_start().split("  ").next().unwrap();
            let named: Vec<&str> = columns.lines().filter(is_first).map(entry).collect();
            assert_eq!(named, headings);
            assert!(states.lines().all(|line| is_first(&line)), "{states}");
        }
    }

    #[test]
    fn every_state_in_the_documentation_has_its_line() {
        let docs = include_str!("../../../../docs/CSI.md");
        for (view, legend) in [("volumes", VOLUMES), ("snapshots", SNAPSHOTS), ("mounts", MOUNTS)] {
            let row = docs.lines().find(|line| line.starts_with(&format!("| `{view}` | `"))).unwrap();
            let cell = row.trim_end_matches(" |").rsplit(" | ").next().unwrap();
            // Explanations may name fields.
            let states =
                cell.split(", `").filter_map(|state| state.trim_start_matches('`').split('`').next());
            let (_, lines) = legend.split_once("States:\n").unwrap();
            let known: Vec<&str> = lines.lines().filter_map(|line| line.split_whitespace().next()).collect();
            assert_eq!(states.collect::<Vec<_>>(), known, "{view}");
        }
    }
}
