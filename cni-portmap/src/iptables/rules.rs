//! The rules of the iptables backend. Chains, order, arguments and comments are the reference's, so
//! that either side finds the other's. No I/O.
//!
//! The entry rules of all containers are in one chain, to which PREROUTING and OUTPUT jump. Each
//! leads to a chain of the container. There, packets that must be masqueraded on their way out are
//! marked first.
//!
//! Only we make the guard of 127.0.0.0/8, for IPv4.

use std::collections::BTreeMap;

use cni_plugin::Invocation;
use ipnetwork::IpNetwork;

use crate::config::{Config, Mark};
use crate::error::Error;
use crate::family::Family;
use crate::mapping::{Protocol, in_family};

/// The table of all rules except the guard.
pub(crate) const TABLE: &str = "nat";
/// The table of the guard. Like `raw`, it comes before address translation, but some kernels have
/// no table `raw`.
pub(crate) const GUARD_TABLE: &str = "mangle";
pub(crate) const GUARD_CHAIN: &str = "CNI-HOSTPORT-GUARD";
/// The chain of the entry rules.
pub(crate) const DNAT_CHAIN: &str = "CNI-HOSTPORT-DNAT";
/// The chain in which old versions of the reference had entry rules for masquerading.
pub(crate) const OLD_SNAT_CHAIN: &str = "CNI-HOSTPORT-SNAT";
const SET_MARK_CHAIN: &str = "CNI-HOSTPORT-SETMARK";
const MASQUERADE_CHAIN: &str = "CNI-HOSTPORT-MASQ";
/// The limit of `multiport`.
const PORTS_PER_RULE: usize = 15;
/// The limit of the comment match, without the final zero.
const COMMENT_MAX: usize = 255;

/// A container in one network. As in the reference, the interface's name is not part of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Owner<'a> {
    pub(crate) network: &'a str,
    pub(crate) container_id: &'a str,
}

impl<'a> Owner<'a> {
    pub(crate) fn of(call: &'a Invocation) -> Self {
        Self { network: &call.conf.name, container_id: &call.container_id }
    }

    /// The container's chain.
    pub(crate) fn chain(&self) -> String {
        self.named("CNI-DN-")
    }

    /// The additional chain that old versions made.
    pub(crate) fn old_snat_chain(&self) -> String {
        self.named("CNI-SN-")
    }

    fn named(&self, prefix: &str) -> String {
        let text = format!("{}{}", self.network, self.container_id);
        format!("{prefix}{}", cni_plugin::sha512_hex(&text, 21))
    }

    /// Whether GC for `network` must remove an entry rule to `target` whose comment names this
    /// owner: the chain's name must match the comment.
    pub(super) fn is_stale(&self, network: &str, is_valid: impl Fn(&str) -> bool, target: &str) -> bool {
        self.network == network && !is_valid(self.container_id) && target == self.chain()
    }

    pub(super) fn comment(&self) -> String {
        let comment = format!(r#"dnat name: "{}" id: "{}""#, self.network, self.container_id);
        // Both parts are ASCII: see the rules for network names and container ids. (The reference
        // truncates one byte later, which iptables refuses.)
        if comment.len() <= COMMENT_MAX { comment } else { format!("{}...", &comment[..COMMENT_MAX - 3]) }
    }
}

/// The network and container id in an entry rule's comment. `None` for other and for truncated
/// comments.
pub(crate) fn owner_of_comment(comment: &str) -> Option<Owner<'_>> {
    let rest = comment.strip_prefix(r#"dnat name: ""#)?;
    let (network, rest) = rest.split_once(r#"" id: ""#)?;
    Some(Owner { network, container_id: rest.strip_suffix('"')? })
}

/// A rule as iptables arguments, and its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rule {
    pub(crate) chain: String,
    pub(crate) place: Place,
    pub(crate) words: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    First,
    Last,
}

/// The rules that one family needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// The container's chain; see [`Owner::chain`].
    pub(crate) chain: String,
    /// Chains and rules that all containers share.
    pub(crate) shared_chains: Vec<&'static str>,
    pub(crate) shared: Vec<Rule>,
    /// Jumps to the container's chain.
    pub(crate) entries: Vec<Rule>,
    /// The rules in the container's chain; their order matters.
    pub(crate) forwards: Vec<Rule>,
    /// Whether [`guard_rules`] are needed too.
    pub(crate) guarded: bool,
}

impl Wanted {
    /// `container`: its address, with the prefix length of its network.
    pub(crate) fn new(
        config: &Config,
        owner: &Owner<'_>,
        family: Family,
        container: IpNetwork,
    ) -> Result<Self, Error> {
        let chain = owner.chain();
        let mut wanted = Self {
            shared_chains: Vec::new(),
            shared: Vec::new(),
            entries: entries(config, owner, family, &chain)?,
            forwards: forwards(config, family, container, &chain)?,
            guarded: config.opens_localnet(family),
            chain,
        };
        if let (true, Mark::Bit(_)) = (config.snat, &config.mark) {
            wanted.add_masquerade(config.mark.value());
        }
        wanted.shared_chains.push(DNAT_CHAIN);
        for hook in ["PREROUTING", "OUTPUT"] {
            wanted.shared.push(rule(hook, &["-m", "addrtype", "--dst-type", "LOCAL", "-j", DNAT_CHAIN]));
        }
        Ok(wanted)
    }

    fn add_masquerade(&mut self, mark: u32) {
        let mark = format!("{mark:#x}/{mark:#x}");
        self.shared_chains.extend([SET_MARK_CHAIN, MASQUERADE_CHAIN]);
        let comment = ["-m", "comment", "--comment"];
        let set = [&comment[..], &["CNI portfwd masquerade mark", "-j", "MARK", "--set-xmark", &mark]];
        self.shared.push(rule(SET_MARK_CHAIN, &set.concat()));
        let masquerade = ["-m", "mark", "--mark", &mark, "-j", "MASQUERADE"];
        self.shared.push(rule(MASQUERADE_CHAIN, &masquerade));
        let enter = [&comment[..], &["CNI portfwd requiring masquerade", "-j", MASQUERADE_CHAIN]];
        // First: masquerading rules of other plugins would end the evaluation.
        self.shared.push(Rule { place: Place::First, ..rule("POSTROUTING", &enter.concat()) });
    }
}

/// With `route_localnet`, the kernel accepts packets to and from 127.0.0.0/8 on a link, and a pod
/// can send such frames. The guard drops them. It does not affect answers to the host's own
/// 127.0.0.1, since they go to the address that masqueraded it, or links with their own address in
/// 127.0.0.0/8.
pub(crate) fn guard_rules() -> [Rule; 3] {
    let comment = |text| ["-m", "comment", "--comment", text];
    let drop = |side, addresses: &str, to| {
        let address = [side, "127.0.0.0/8"];
        let kind = ["-m", "addrtype", "!", addresses, "LOCAL", "--limit-iface-in", "-j", "DROP"];
        rule(GUARD_CHAIN, &[&address[..], &comment(to), &kind].concat())
    };
    let enter = [&["!", "-i", "lo"][..], &comment("CNI portfwd localnet guard"), &["-j", GUARD_CHAIN]];
    [
        drop("-d", "--dst-type", "CNI portfwd to localnet"),
        drop("-s", "--src-type", "CNI portfwd from localnet"),
        // First: other plugins' rules may accept packets, which ends the evaluation.
        Rule { place: Place::First, ..rule("PREROUTING", &enter.concat()) },
    ]
}

/// One rule for each protocol and 15 ports. As in the reference, ports with a host address of the
/// other family are included.
fn entries(config: &Config, owner: &Owner<'_>, family: Family, chain: &str) -> Result<Vec<Rule>, Error> {
    let mut ports: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for entry in &config.entries {
        ports.entry(entry.protocol()?.name()).or_default().push(entry.host_port.to_string());
    }
    let mut rules = Vec::new();
    for (protocol, ports) in ports {
        for group in ports.chunks(PORTS_PER_RULE) {
            let (comment, ports) = (owner.comment(), group.join(","));
            let head = ["-m", "comment", "--comment", &comment, "-m", "multiport", "-p", protocol];
            let mut rule = rule(DNAT_CHAIN, &head);
            rule.words.extend(["--destination-ports".to_owned(), ports]);
            rule.words.extend(config.conditions(family).iter().cloned());
            rule.words.extend(["-j".to_owned(), chain.to_owned()]);
            rules.push(rule);
        }
    }
    Ok(rules)
}

fn forwards(config: &Config, family: Family, container: IpNetwork, chain: &str) -> Result<Vec<Rule>, Error> {
    let set_mark = match &config.mark {
        Mark::Bit(_) => SET_MARK_CHAIN,
        Mark::ExternalChain(chain) => chain,
    };
    let sources = match (config.masq_all, family) {
        (true, Family::V4) => vec!["0.0.0.0/0".to_owned()],
        (true, Family::V6) => vec!["::/0".to_owned()],
        // The container itself and its neighbours, whose answers would not return through the host,
        // and the host's own 127.0.0.1.
        (false, Family::V4) => vec![container.to_string(), "127.0.0.1".to_owned()],
        (false, Family::V6) => vec![container.to_string()],
    };
    let mut rules = Vec::new();
    for mapping in in_family(&config.entries, family)? {
        let host_port = mapping.host_port.to_string();
        let mut packet = vec!["-p", mapping.protocol.name(), "--dport", &host_port];
        let host_ip = mapping.host_ip.map(|ip| ip.to_string());
        packet.extend(host_ip.iter().flat_map(|ip| ["-d", ip]));
        if config.snat {
            for source in &sources {
                rules.push(rule(chain, &[&packet[..], &["-s", source, "-j", set_mark]].concat()));
            }
        }
        let destination = std::net::SocketAddr::new(container.ip(), mapping.container_port).to_string();
        let rewrite = ["-j", "DNAT", "--to-destination", &destination];
        rules.push(rule(chain, &[&packet[..], &rewrite].concat()));
    }
    Ok(rules)
}

fn rule(chain: &str, words: &[&str]) -> Rule {
    Rule {
        chain: chain.to_owned(),
        place: Place::Last,
        words: words.iter().map(|word| (*word).to_owned()).collect(),
    }
}

/// Which packets a rule leads to which chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Entrance<'a> {
    chain: &'a str,
    /// `None`: any.
    protocol: Option<Protocol>,
    ports: &'a [u16],
}

/// The content of a rule, independent of notation: our arguments, or iptables' output.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Gist {
    /// `None`: any.
    source: Option<IpNetwork>,
    destination: Option<IpNetwork>,
    protocol: Option<Protocol>,
    ports: Vec<u16>,
    /// A chain or a target such as `DNAT`.
    pub(crate) target: String,
    /// All other options, without the names of matches.
    rest: Vec<String>,
    pub(crate) comment: Option<String>,
}

impl Gist {
    /// `words`: without `-A CHAIN`.
    pub(crate) fn of(words: &[String]) -> Self {
        let mut gist = Self::default();
        let mut words = words.iter().map(String::as_str);
        let mut negated = false;
        while let Some(word) = words.next() {
            if word == "!" {
                negated = true;
                continue;
            }
            match (word, negated) {
                ("-m" | "--match", _) => _ = words.next(),
                ("--comment", _) => gist.comment = words.next().map(str::to_owned),
                ("-s" | "--source", false) => gist.source = words.next().and_then(network),
                ("-d" | "--destination", false) => gist.destination = words.next().and_then(network),
                ("-p" | "--protocol", false) => gist.protocol = words.next().and_then(protocol),
                ("--dport" | "--dports" | "--destination-port" | "--destination-ports", false) => {
                    let ports = words.next().unwrap_or_default().split(',');
                    gist.ports = ports.filter_map(|port| port.parse().ok()).collect();
                }
                ("-j" | "--jump", _) => gist.target = words.next().unwrap_or_default().to_owned(),
                (other, negated) => gist.rest.push(format!("{}{other}", if negated { "! " } else { "" })),
            }
            negated = false;
        }
        gist
    }

    /// The rule without its comment.
    pub(crate) fn effect(&self) -> Self {
        Self { comment: None, ..self.clone() }
    }

    pub(crate) fn does_like(&self, other: &Self) -> bool {
        self.effect() == other.effect()
    }

    /// Whether both lead the same ports to the same chain. Their conditions cannot be compared,
    /// since iptables prints them in its own notation.
    pub(crate) fn enters_like(&self, other: &Self) -> bool {
        self.entrance() == other.entrance()
    }

    pub(crate) fn entrance(&self) -> Entrance<'_> {
        Entrance { chain: &self.target, protocol: self.protocol, ports: &self.ports }
    }
}

/// Without host bits, as iptables prints it; `None` for all addresses, which it omits.
fn network(text: &str) -> Option<IpNetwork> {
    let network: IpNetwork = text.parse().ok()?;
    IpNetwork::new(network.network(), network.prefix()).ok().filter(|network| network.prefix() > 0)
}

/// A name, or a number if the host knows no name.
fn protocol(text: &str) -> Option<Protocol> {
    Protocol::parse(text).or_else(|| Protocol::from_number(text.parse().ok()?))
}
