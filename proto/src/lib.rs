//! The wire contracts between Hawser's parts and their counterparts elsewhere,
//! generated from the texts in `proto/`. Written by hand are these module
//! declarations, `deadline`, [`mount_pod`], `signals` and [`versions`]; each contract of messages is a feature, so that
//! a part links only what it speaks.

// Generated code answers to its generator's taste.
#![allow(unreachable_pub, missing_debug_implementations, clippy::all, clippy::pedantic)]

#[cfg(feature = "grpc")]
pub mod deadline;
pub mod mount_pod;
#[cfg(feature = "cri")]
pub mod signals;
pub mod versions;

/// Container Storage Interface v1.12 (package `csi.v1`).
#[cfg(feature = "csi")]
pub mod csi {
    pub use prost_types::Timestamp;

    tonic::include_proto!("csi.v1");
}

/// Kubelet plugin registration v1 (package `pluginregistration`).
#[cfg(feature = "registration")]
pub mod registration {
    tonic::include_proto!("pluginregistration");
}

/// Container Runtime Interface v1 (package `runtime.v1`).
#[cfg(feature = "cri")]
pub mod cri {
    tonic::include_proto!("runtime.v1");
}

/// gRPC health checking v1 (package `grpc.health.v1`).
#[cfg(feature = "health")]
pub mod health {
    tonic::include_proto!("grpc.health.v1");
}

/// The client side of `hawser-kubelet` (package `hawser.kubelet.v1`).
#[cfg(feature = "kubelet")]
pub mod kubelet {
    tonic::include_proto!("hawser.kubelet.v1");
}

/// What an operator asks a running driver (package `hawser.admin.v1`).
#[cfg(feature = "admin")]
pub mod admin {
    tonic::include_proto!("hawser.admin.v1");
}

/// FUSE connection hand-over from driver to daemon (package `hawser.handover.v1`).
#[cfg(feature = "handover")]
pub mod handover {
    use crate::versions::Versions;

    /// What this build speaks.
    pub const VERSIONS: Versions = Versions { oldest: 3, newest: 6 };

    /// The first version with a state table and a keeper.
    pub const FIRST_WITH_STATE: u32 = 4;

    /// The first version whose daemons can prepare to follow one that still serves.
    pub const FIRST_WITH_PROCEED: u32 = 5;

    /// The first version whose daemons know data paths and capacity policies. An earlier one counts, and
    /// answers reads and writes itself.
    pub const FIRST_WITH_POLICIES: u32 = 6;

    /// The size of the state table of a daemon that may know this many inodes, and twice as many for a
    /// moment: 288 bytes for each, with the longest name, and room for handles and charges. Memory is taken only
    /// for what is written.
    pub fn state_table_bytes(known_inodes: u32) -> u64 {
        (8 << 20) + 2 * 288 * u64::from(known_inodes)
    }

    /// The environment variable in which a launcher passes a daemon the nonce of its Hello.
    pub const NONCE_VARIABLE: &str = "HAWSER_NONCE";

    include!(concat!(env!("OUT_DIR"), "/hawser.handover.v1.rs"));
}

/// What the driver asks of a serving daemon (package `hawser.control.v1`).
#[cfg(feature = "handover")]
pub mod control {
    /// What this build's daemons speak. A daemon outlives drivers, so a driver asks a daemon of an
    /// earlier version nothing that this version lacks.
    pub const VERSION: u32 = 3;

    /// The first version whose daemons take another keeper, and return their descriptors.
    pub const FIRST_WITH_KEEPERS: u32 = 2;

    include!(concat!(env!("OUT_DIR"), "/hawser.control.v1.rs"));
}
