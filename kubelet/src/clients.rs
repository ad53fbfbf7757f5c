//! The gRPC services that the kubelet calls: the container runtime (CRI), and registered drivers
//! (plugin registration and CSI).

pub(crate) mod cri;
pub(crate) mod csi;
pub(crate) mod csi_secrets;
pub(crate) mod plugins;
pub(crate) mod unix_channel;
