//! Names by which the plugin finds its links, and the notation of a MAC in results.

use cni_plugin::{Invocation, sha512_hex};
use linux::netlink::Mac;

const VETH_NAME_DIGITS: usize = 8;
/// IFALIASZ without the final zero.
const ALIAS_MAX: usize = 255;
/// Length of each digest in an alias: 128 bits.
const ALIAS_DIGITS: usize = 32;

/// The alias that marks the veth of a call as ours and names its attachment.
pub(crate) fn alias(call: &Invocation) -> String {
    alias_of(&call.conf.name, &call.container_id, &call.ifname)
}

/// The name of the host's veth, unless another link has it: `veth` and eight hexadecimal digits as
/// in the reference, but from a digest. The port of an ADD that was killed before it set the alias
/// has no other mark.
pub(crate) fn veth_name(call: &Invocation) -> String {
    let attachment = format!("{}:{}:{}", call.conf.name, call.container_id, call.ifname);
    format!("veth{}", sha512_hex(&attachment, VETH_NAME_DIGITS))
}

/// `cni:<network>:<container id>:<ifname>`. If that is too long for an alias, digests replace the
/// names, after a `~` that no name contains.
pub(crate) fn alias_of(network: &str, container_id: &str, ifname: &str) -> String {
    let alias = format!("cni:{network}:{container_id}:{ifname}");
    if alias.len() <= ALIAS_MAX {
        return alias;
    }
    let attachment = sha512_hex(&format!("{container_id}:{ifname}"), ALIAS_DIGITS);
    format!("{}{attachment}", digest_prefix(network))
}

/// Whether the alias marks one of our veths.
pub(crate) fn is_of_attachment(alias: &str) -> bool {
    alias.starts_with("cni:")
}

/// Whether the alias marks one of our veths in the network. Names and ids contain no colon.
pub(crate) fn is_of_network(alias: &str, network: &str) -> bool {
    alias.starts_with(&format!("cni:{network}:")) || alias.starts_with(&digest_prefix(network))
}

fn digest_prefix(network: &str) -> String {
    format!("cni:~{}:", sha512_hex(network, ALIAS_DIGITS))
}

/// Empty for `None`.
pub(crate) fn format_mac(mac: Option<Mac>) -> String {
    let Some(mac) = mac else { return String::new() };
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_alias_too_long_for_the_kernel_is_digests_of_the_same_network() {
        let network = "n".repeat(200);
        let (id, other) = ("ab".repeat(32), "cd".repeat(32));
        let alias = alias_of(&network, &id, "eth0");
        assert!(alias.len() <= ALIAS_MAX && is_of_network(&alias, &network));
        assert!(!is_of_network(&alias, "n"));
        assert_ne!(alias, alias_of(&network, &other, "eth0"));
        assert_eq!(alias_of("net", "id", "eth0"), "cni:net:id:eth0");
        assert!(is_of_network("cni:net:id:eth0", "net") && !is_of_network("cni:net2:id:eth0", "net"));
    }
}
