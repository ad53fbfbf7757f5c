//! The rules of the iptables backend for a container, as iptables(8) arguments and as nf_tables
//! shows them. No I/O.
//!
//! All interfaces of a container in a network share one chain: the reference's name for it contains
//! only these two.

use std::net::IpAddr;

use cni_plugin::{ValidAttachments, sha512_hex};
use ipnetwork::IpNetwork;
use netfilter::nftables::{Batch, CmpOp, Expression, Family, PayloadBase, Rule};

/// The table, by its name in iptables and ip6tables.
pub(crate) const TABLE: &str = "nat";
pub(crate) const POSTROUTING: &str = "POSTROUTING";
pub(crate) const FAMILIES: [Family; 2] = [Family::Ipv4, Family::Ipv6];

/// Where the source address begins in the IP header.
const SOURCE_V4: u32 = 12;
const SOURCE_V6: u32 = 8;

/// `CNI-` and 24 digits: iptables allows 28 bytes.
pub(crate) fn chain_name(network: &str, container_id: &str) -> String {
    format!("CNI-{}", sha512_hex(&format!("{network}{container_id}"), 24))
}

pub(crate) fn comment(network: &str, container_id: &str) -> String {
    format!("{}{container_id}\"", comment_prefix(network))
}

fn comment_prefix(network: &str) -> String {
    format!("name: \"{network}\" id: \"")
}

/// The rules that masquerade one address: chain, and the words after it.
pub(crate) fn rules_of(address: &IpNetwork, chain: &str, comment: &str) -> [(String, Vec<String>); 3] {
    let multicast = if address.is_ipv4() { "224.0.0.0/4" } else { "ff00::/8" };
    let network = format!("{}/{}", address.network(), address.prefix());
    let host = format!("{}/{}", address.ip(), if address.is_ipv4() { 32 } else { 128 });
    let words = |matched: &[&str], target: &str| {
        let rest = ["-m", "comment", "--comment", comment, "-j", target];
        matched.iter().copied().chain(rest).map(str::to_owned).collect::<Vec<String>>()
    };
    [
        (chain.to_owned(), words(&["-d", &network], "ACCEPT")),
        (chain.to_owned(), words(&["!", "-d", multicast], "MASQUERADE")),
        (POSTROUTING.to_owned(), words(&["-s", &host], chain)),
    ]
}

/// The known addresses of an attachment. If there are none, all rules count as its own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Addresses {
    pub(crate) known: Vec<IpAddr>,
    /// Whether the list is complete: the container may have removed addresses from its interface.
    pub(crate) complete: bool,
}

impl Addresses {
    /// Whether the attachment may have an address of the IP version.
    pub(crate) fn may_include(&self, v4: bool) -> bool {
        !self.complete || self.known.is_empty() || self.known.iter().any(|address| address.is_ipv4() == v4)
    }
}

/// The attachment's own jumps among those from each family's addresses to a container's chain; the
/// others belong to another interface. If its addresses of a family are unknown, all are its own,
/// unless the other family shows another interface. Before v0.8.0, the reference made one jump from the
/// whole network, which belongs to an address without a jump of its own. `source_of`: the addresses
/// from which one jumps.
pub(crate) fn own_jumps<'a, J>(
    addresses: &Addresses,
    jumps: [&'a [J]; 2],
    source_of: impl Fn(&J) -> Option<IpNetwork>,
) -> [Vec<&'a J>; 2] {
    let known = FAMILIES.map(|family| {
        let of_family = |address: &&IpAddr| address.is_ipv4() == (family == Family::Ipv4);
        addresses.known.iter().filter(of_family).copied().collect::<Vec<IpAddr>>()
    });
    let is_from = |at: usize, jump: &J, address: IpAddr| {
        let alone = IpNetwork::from(address);
        let has_its_own = || jumps[at].iter().any(|jump| source_of(jump) == Some(alone));
        source_of(jump).is_some_and(|from| from == alone || from.contains(address) && !has_its_own())
    };
    let is_own = |at: usize, jump: &J| known[at].iter().any(|address| is_from(at, jump, *address));
    let shows_another = |at: usize| !known[at].is_empty() && !jumps[at].iter().all(|jump| is_own(at, jump));
    let is_shared = [0, 1].into_iter().any(shows_another);
    [0, 1].map(|at| {
        let unknown = known[at].is_empty() && !addresses.complete && !is_shared;
        let all = addresses.known.is_empty() || unknown;
        jumps[at].iter().filter(|jump| all || is_own(at, jump)).collect()
    })
}

/// Removes the attachment's jumps to `chain` and, if none is left, the chain. `found`: for each
/// family with the chain, its rules and the jumps to it.
pub(crate) fn plan_removal(
    chain: &str,
    addresses: &Addresses,
    found: &[Option<Vec<Rule>>; 2],
    batch: &mut Batch,
) {
    let is_jump = |rule: &&Rule| rule.chain != chain && rule.target_chain() == Some(chain);
    let jumps = found.each_ref().map(|rules| rules.iter().flatten().filter(is_jump).collect::<Vec<_>>());
    let own = own_jumps(addresses, jumps.each_ref().map(Vec::as_slice), |rule| source_of(rule));
    for (at, family) in FAMILIES.into_iter().enumerate() {
        for rule in &own[at] {
            batch.delete_rule(family, TABLE, &rule.chain, rule.handle);
        }
        if found[at].is_some() && own[at].len() == jumps[at].len() {
            batch.flush_chain(family, TABLE, chain).delete_chain(family, TABLE, chain);
        }
    }
}

/// Whether each address of the family has a jump to `chain`, and the chain masquerades.
pub(crate) fn is_complete(chain: &str, addresses: &[IpNetwork], rules: &[Rule]) -> bool {
    let jumps = |address: &IpNetwork| {
        let mut to_chain = rules.iter().filter(|rule| rule.target_chain() == Some(chain));
        to_chain.any(|rule| rule.chain == POSTROUTING && compares_with(rule, address.ip()))
    };
    let masquerades = |rule: &Rule| rule.chain == chain && rule.expressions.iter().any(is_masquerade);
    addresses.iter().all(jumps) && rules.iter().any(masquerades)
}

fn is_masquerade(expression: &Expression) -> bool {
    match expression {
        Expression::Masquerade { .. } => true,
        Expression::XtTarget { name, .. } => name == "MASQUERADE",
        _ => false,
    }
}

fn compares_with(rule: &Rule, address: IpAddr) -> bool {
    let octets = match address {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let same = |e: &Expression| matches!(e, Expression::Cmp { op: CmpOp::Eq, value, .. } if *value == octets);
    rule.expressions.iter().any(same)
}

/// The addresses from which a rule jumps. iptables-nft compares their first bytes, or all under a
/// mask.
fn source_of(rule: &Rule) -> Option<IpNetwork> {
    rule.expressions.iter().enumerate().find_map(|(at, expression)| {
        let Expression::Payload { base: PayloadBase::Network, offset, .. } = expression else { return None };
        match rule.expressions.get(at + 1..)? {
            [Expression::Cmp { op: CmpOp::Eq, value, .. }, ..] => source(*offset, value, 8 * value.len()),
            [Expression::Bitwise { mask, .. }, Expression::Cmp { op: CmpOp::Eq, value, .. }, ..] => {
                source(*offset, value, mask.iter().map(|byte| byte.count_ones() as usize).sum())
            }
            _ => None,
        }
    })
}

/// The network at `offset` of the IP header, from its first bytes.
fn source(offset: u32, first_bytes: &[u8], prefix: usize) -> Option<IpNetwork> {
    let mut octets = [0; 16];
    octets.get_mut(..first_bytes.len())?.copy_from_slice(first_bytes);
    let address = match offset {
        SOURCE_V4 => IpAddr::from(*octets.first_chunk::<4>()?),
        SOURCE_V6 => IpAddr::from(octets),
        _ => return None,
    };
    IpNetwork::new(address, u8::try_from(prefix).ok()?).ok()
}

/// The chains of containers of `network` without any valid interface.
pub(crate) fn stale_chains(network: &str, valid: &ValidAttachments, rules: &[Rule]) -> Vec<String> {
    let prefix = comment_prefix(network);
    let ids = rules.iter().filter_map(|rule| rule.comment.as_ref()?.strip_prefix(&prefix)?.strip_suffix('"'));
    let stale = ids.filter(|id| !valid.contains_container(id)).map(|id| chain_name(network, id));
    let mut chains: Vec<String> = stale.filter(|name| rules.iter().any(|rule| rule.chain == *name)).collect();
    chains.sort();
    chains.dedup();
    chains
}

#[cfg(test)]
mod tests {
    use netfilter::nftables::Verdict;

    use super::*;

    fn rule(chain: &str, comment: &str, target: &str) -> Rule {
        Rule {
            chain: chain.to_owned(),
            handle: 1,
            comment: Some(comment.to_owned()),
            tag: None,
            expressions: vec![Expression::Verdict(Verdict::Jump(target.to_owned()))],
        }
    }

    #[test]
    fn jumps_of_an_unknown_family_are_own_unless_the_other_family_shows_another_interface() {
        let own = |known: &[&str], complete: bool, v4: &[&'static str]| {
            let known = known.iter().map(|ip| ip.parse().unwrap()).collect();
            let jumps = [v4, &["fd00::2"][..]];
            let own = own_jumps(&Addresses { known, complete }, jumps, |jump| jump.parse().ok());
            own.concat().into_iter().copied().collect::<Vec<&str>>()
        };
        let both = ["10.0.0.2", "10.0.0.3"];
        assert_eq!(own(&["10.0.0.2"], false, &both[..1]), ["10.0.0.2", "fd00::2"]);
        assert_eq!(own(&["10.0.0.2"], false, &[]), ["fd00::2"]);
        assert_eq!(own(&["10.0.0.2"], false, &both), ["10.0.0.2"]);
        assert_eq!(own(&["10.0.0.2"], true, &both[..1]), ["10.0.0.2"], "it never had another");
        assert_eq!(own(&["10.0.0.3", "fd00::9"], false, &both), ["10.0.0.3"]);
        assert_eq!(own(&[], true, &both), ["10.0.0.2", "10.0.0.3", "fd00::2"]);
    }

    #[test]
    fn a_chain_is_stale_when_its_comment_names_this_network_and_no_valid_container() {
        let conf = r#"{"name":"net","cniVersion":"1.1.0",
            "cni.dev/valid-attachments":[{"containerID":"valid","ifname":"eth3"}]}"#;
        let conf = cni_plugin::NetConf::parse(conf.into()).unwrap();
        let valid = ValidAttachments::read(&conf).unwrap();
        let mut rules = Vec::new();
        for (network, id) in [("net", "valid"), ("net", "stale"), ("net2", "stale")] {
            let chain = chain_name(network, id);
            rules.push(rule(&chain, &comment(network, id), "x"));
            rules.push(rule(POSTROUTING, &comment(network, id), &chain));
        }
        // Of the port mappings, which are not ours.
        rules.push(rule("CNI-DN-x", &format!("dnat {}", comment("net", "stale")), "x"));
        assert_eq!(stale_chains("net", &valid, &rules), [chain_name("net", "stale")]);
    }
}
