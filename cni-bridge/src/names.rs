//! Names by which the plugin finds its links again, and how results write a MAC.

use cni_plugin::{Invocation, sha512_hex};
use linux::netlink::Mac;

const VETH_NAME_DIGITS: usize = 8;
/// IFALIASZ without the final zero.
const ALIAS_MAX: usize = 255;
/// Of each digest in an alias: 128 bits.
const ALIAS_DIGITS: usize = 32;

/// What marks the veth of a call as ours and says whose it is.
pub(crate) fn alias(call: &Invocation) -> String {
    alias_of(&call.conf.name, &call.container_id, &call.ifname)
}

/// What the host's end is called unless another link has the name: `veth` and
/// eight hexadecimal digits, as the reference has it, but of a digest. An ADD
/// killed before the alias is set leaves nothing else to know its port by.
pub(crate) fn veth_name(call: &Invocation) -> String {
    let attachment = format!("{}:{}:{}", call.conf.name, call.container_id, call.ifname);
    format!("veth{}", sha512_hex(&attachment, VETH_NAME_DIGITS))
}

/// `cni:<network>:<container id>:<ifname>`; where that is longer than an alias
/// may be, digests in the place of the names, behind a `~` that no name has.
pub(crate) fn alias_of(network: &str, container_id: &str, ifname: &str) -> String {
    let alias = format!("cni:{network}:{container_id}:{ifname}");
    if alias.len() <= ALIAS_MAX {
        return alias;
    }
    let attachment = sha512_hex(&format!("{container_id}:{ifname}"), ALIAS_DIGITS);
    format!("{}{attachment}", digest_prefix(network))
}

/// Whether the alias marks a veth of ours in the network. Neither names nor ids
/// contain a colon.
pub(crate) fn is_of_network(alias: &str, network: &str) -> bool {
    alias.starts_with(&format!("cni:{network}:")) || alias.starts_with(&digest_prefix(network))
}

fn digest_prefix(network: &str) -> String {
    format!("cni:~{}:", sha512_hex(network, ALIAS_DIGITS))
}

/// Empty where there is none.
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
