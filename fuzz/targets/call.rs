//! A call with the input as its configuration.

use std::path::PathBuf;

use cni_plugin::{Command, Invocation, NetConf};

/// The first line is `CNI_ARGS`, the rest is stdin; `None` where the protocol's
/// own part refuses it.
pub(crate) fn with(input: &[u8]) -> Option<Invocation> {
    let end = input.iter().position(|byte| *byte == b'\n')?;
    let (args, stdin) = (&input[..end], &input[end + 1..]);
    Some(Invocation {
        command: Command::Add,
        container_id: "c".to_owned(),
        netns: Some(PathBuf::from("/run/netns/c")),
        ifname: "eth0".to_owned(),
        args: String::from_utf8_lossy(args).into_owned(),
        path: vec![PathBuf::from("/opt/cni/bin")],
        conf: NetConf::parse(stdin.to_vec()).ok()?,
    })
}
