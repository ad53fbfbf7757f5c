use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use super::*;
use proto::versions::Versions;

use crate::model::access_mode::AccessMode;
use crate::model::ids::{SnapshotId, VolumeId};
use crate::model::name::VolumeName;

const HEAD: &str = "| message, for example | code |\n|---|---|\n";

/// One of each variant.
fn examples() -> Vec<Error> {
    let name = VolumeName::parse("pvc-1").unwrap();
    let volume_id = || VolumeId::for_name(&name);
    let path = || PathBuf::from("/path");
    let text = str::to_owned;
    let kernel = || linux::Error::new("mount", "/path", std::io::Error::from_raw_os_error(5));
    let (found, wanted) = (|| text("FOUND"), || text("WANTED"));
    let mode = AccessMode::SingleNodeWriter;
    let limit = Duration::from_secs(5);
    let boxed = || Box::new(Error::Kernel { step: "mount volume", source: kernel() });
    vec![
        Error::MissingField { field: "name" },
        Error::InvalidField { field: "parameters.threads", value: text("many"), reason: text("REASON") },
        Error::UnknownParameter { name: text("bakend"), known: text("backend, ...") },
        Error::UnknownVolume { volume_id: text("vol-1") },
        Error::UnknownSnapshot { snapshot_id: text("snap-1") },
        Error::UnknownNode { node_id: text("node-9"), known: text("node-1") },
        Error::NotAtPath { volume_id: volume_id(), path: path() },
        Error::ExistsOtherwise {
            name: text("pvc-1"),
            what: "a capacity of",
            found: found(),
            wanted: wanted(),
        },
        Error::SnapshotOtherwise { name: text("snap"), found: volume_id(), wanted: text("vol-9") },
        Error::StagedOtherwise { volume_id: volume_id(), path: path(), found: found(), wanted: wanted() },
        Error::PublishedOtherwise { volume_id: volume_id(), path: path(), found: found(), wanted: wanted() },
        Error::AttachedOtherwise {
            volume_id: volume_id(),
            node_id: text("node-1"),
            found: found(),
            wanted: wanted(),
        },
        Error::NotStaged { volume_id: volume_id(), path: path() },
        Error::StagedElsewhere { volume_id: volume_id(), staged: path(), wanted: "/other".into() },
        Error::ServesAnother { volume_id: volume_id(), path: path() },
        Error::StillPublished { volume_id: volume_id(), path: path() },
        Error::StillStaged { volume_id: volume_id(), path: path() },
        Error::StillAttached { volume_id: volume_id(), node_id: text("node-1") },
        Error::SecondTarget { volume_id: volume_id(), published: path(), mode },
        Error::UnusablePath { field: "target_path", path: path(), reason: text("not a directory") },
        Error::ForeignMount { volume_id: volume_id(), path: path(), found: text("ext4 from /dev/sda1") },
        Error::AttachedElsewhere { volume_id: volume_id(), node_id: text("node-1"), mode },
        Error::NotAttached {
            volume_id: volume_id(),
            node_id: text("node-1"),
            key: crate::engine::attach::ATTACHMENT_KEY,
        },
        Error::NoReflink {
            pool: path(),
            fs_type: text("ext4"),
            class: crate::engine::snapshots::CLASS_OF_SNAPSHOTS,
        },
        Error::NoKernelQuota {
            what: text("parameters.capacity \"kernel\""),
            pool: path(),
            reason: text("btrfs without quotas"),
            remedy: text("run \"btrfs quota enable /path\""),
        },
        Error::NoPassthrough { release: text("6.1.0") },
        Error::NoKeeper,
        Error::NoControl { volume_id: volume_id(), what: "SetCapacity" },
        Error::CannotStage { volume_id: volume_id(), what: "dataPath passthrough", reason: "REASON" },
        Error::NotWrittenBack { volume_id: volume_id(), reason: text("REASON") },
        Error::DaemonCannot { volume_id: volume_id(), what: "Quiesce", reason: text("REASON") },
        Error::CannotUpgrade { volume_id: volume_id(), reason: text("REASON") },
        Error::CannotPrepare { volume_id: volume_id(), version: 4, first: 5 },
        Error::UnknownData { what: text("volume vol-1"), path: path() },
        Error::Unready { what: "pool", reason: chain(&kernel()) },
        Error::LargerThanPool { wanted_bytes: 2, pool_bytes: 1 },
        Error::SourceLarger { origin: text("snapshot snap-1"), source_bytes: 2, wanted_bytes: 1 },
        Error::BeyondSize { volume_id: volume_id(), size_bytes: 2, wanted: text("at least 3 bytes") },
        Error::PoolFull { wanted_bytes: 2, committed_bytes: 9, pool_bytes: 10 },
        Error::PoolOutOfInodes { wanted: 2, committed: 9, promised: 10 },
        Error::OutOfTopology { key: text("topology.csi.hawser.dev/node"), node_id: text("node-1") },
        Error::NotOnThisNode {
            key: text("topology.csi.hawser.dev/node"),
            node_id: text("node-1"),
            source: Box::new(Error::NoKeeper),
        },
        Error::TooManyVolumes { node_id: text("node-1"), limit: 4 },
        Error::Pending { what: text("volume vol-1") },
        Error::BeingDeleted { volume_id: volume_id() },
        Error::BadToken { value: text("TOKEN") },
        Error::Crowded { operation: "csi.NodeStageVolume", most: 384 },
        Error::Copying { what: text("volume vol-1"), done_bytes: 1, total_bytes: 2 },
        Error::LeaseLost { volume_id: volume_id() },
        Error::Unfilled { volume_id: volume_id() },
        Error::Busy { path: path() },
        Error::PathChanged { field: "target_path", path: path(), reason: text("REASON") },
        Error::Abandoned { volume_id: volume_id() },
        Error::Interrupted { what: text("syncfs of volume vol-1") },
        Error::DaemonLives { volume_id: volume_id(), pid: 4711 },
        Error::ControlLost { volume_id: volume_id(), what: "SetCapacity" },
        Error::JournalUnreadable { path: path(), reason: text("REASON") },
        Error::Panicked { operation: "csi.CreateVolume" },
        Error::Uncleared { what: format!("volume {}", volume_id()), source: boxed() },
        Error::Rollback { cause: boxed(), rollback: boxed() },
        Error::PoolAway { path: path(), reason: text("REASON") },
        Error::Deadline { what: text("csi.NodeStageVolume"), limit: Duration::from_secs(100) },
        Error::DialTimeout {
            socket: path(),
            waited: Duration::from_secs(80),
            launch: text("pod hawser-system/NAME with image IMAGE"),
        },
        Error::Silent { volume_id: volume_id(), what: "SetCapacity", limit },
        Error::Launch {
            volume_id: volume_id(),
            launch: text("pod hawser-system/NAME with image IMAGE"),
            source: kernel(),
        },
        Error::DaemonEnded {
            volume_id: volume_id(),
            launch: text("a process of /path"),
            log: Some(text("LAST LINE")),
        },
        Error::DaemonRefused { volume_id: volume_id(), reason: text("REASON") },
        Error::DaemonVersion {
            volume_id: volume_id(),
            daemon: Versions { oldest: 2, newest: 2 },
            driver: Versions { oldest: 3, newest: 6 },
        },
        Error::HandOver { volume_id: volume_id(), reason: text("REASON") },
        Error::WrongDescriptor { volume_id: volume_id(), role: "ROLE_FUSE_DEVICE", reason: text("REASON") },
        Error::ControlRefused { volume_id: volume_id(), what: "SetCapacity", reason: text("REASON") },
        Error::Kernel { step: "mount volume", source: kernel() },
        Error::SnapshotFailed { snapshot_id: SnapshotId::for_name(&name), reason: text("REASON") },
    ]
}

fn variant(error: &Error) -> String {
    let shown = format!("{error:?}");
    shown.split([' ', '{']).next().unwrap_or_default().to_owned()
}

#[test]
fn every_error_has_an_example() {
    let source = include_str!("../../error.rs");
    let body = source.split("pub enum Error {").nth(1).unwrap().split("\n}\n").next().unwrap();
    let declared: BTreeSet<String> = body
        .lines()
        .filter_map(|line| {
            line.strip_prefix("    ")?.strip_suffix('{').or(line.trim_end().strip_prefix("    "))
        })
        .filter(|line| line.starts_with(|c: char| c.is_ascii_uppercase()))
        .map(|line| line.split([' ', '{', ',']).next().unwrap_or_default().to_owned())
        .collect();
    let shown: BTreeSet<String> = examples().iter().map(variant).collect();
    assert_eq!(declared, shown);
    assert_eq!(examples().len(), shown.len(), "each once");
}

#[test]
fn the_documented_error_table_is_the_table() {
    let wire_name = |code: Code| -> String {
        let words = format!("{code:?}");
        let upper = |(at, c): (usize, char)| {
            let gap = if at > 0 && c.is_uppercase() { "_" } else { "" };
            format!("{gap}{}", c.to_ascii_uppercase())
        };
        words.char_indices().map(upper).collect()
    };
    let digits = "f2868e1aa7cab669517cd9f5ab1b7957";
    let row = |error: &Error| {
        let message = chain(error).replace(digits, "...");
        format!("| `{message}` | {} |\n", wire_name(code(error)))
    };
    let wanted: String = std::iter::once(HEAD.to_owned()).chain(examples().iter().map(row)).collect();
    let docs = include_str!("../../../../docs/CSI.md");
    let found = docs.split(HEAD).nth(1).and_then(|rest| rest.split("\n\n").next()).unwrap_or_default();
    assert!(format!("{HEAD}{}\n", found.trim_end()) == wanted, "docs/CSI.md needs this table:\n{wanted}");
}

#[test]
fn a_status_is_no_longer_than_a_header_may_be() {
    let message = |error: Error| status(&error).message().to_owned();
    let invalid = message(Error::invalid("name", "\u{fc}".repeat(100_000), "longer than 128 bytes"));
    assert_eq!(invalid, format!("name: {:?}: longer than 128 bytes", "\u{fc}".repeat(64) + "..."));
    let unknown = message(Error::UnknownVolume { volume_id: "v".repeat(100_000) });
    assert_eq!(unknown.len(), MAX_MESSAGE_BYTES + 3);
}

#[test]
fn a_failure_whose_rollback_failed_is_never_final() {
    let left_behind = Error::Rollback {
        cause: Box::new(Error::MissingField { field: "a" }),
        rollback: Box::new(Error::MissingField { field: "b" }),
    };
    assert_eq!(code(&left_behind), Code::Aborted);
    assert_eq!(status(&left_behind).message(), "a is required; and rolling back: b is required");
}
