//! /etc/hosts of a pod's containers: a file in the pod's directory, rewritten at each container
//! start and mounted over the image's.

use std::net::IpAddr;

use crate::objects::HostAlias;

const HEADER: &str = "# Kubernetes-managed hosts file.\n";
const HOST_NETWORK_HEADER: &str = "# Kubernetes-managed hosts file (host network).\n";
const FIXED: &str = "127.0.0.1\tlocalhost\n\
::1\tlocalhost ip6-localhost ip6-loopback\n\
fe00::0\tip6-localnet\n\
fe00::0\tip6-mcastprefix\n\
fe00::1\tip6-allnodes\n\
fe00::2\tip6-allrouters\n";

/// The pod's own part of the file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Hosts {
    pub(crate) pod_ips: Vec<IpAddr>,
    pub(crate) hostname: String,
    /// May be empty.
    pub(crate) domain: String,
}

impl Hosts {
    /// The content for a pod with its own network.
    pub(crate) fn managed(&self) -> String {
        let mut text = format!("{HEADER}{FIXED}");
        let Self { hostname, domain, .. } = self;
        for ip in &self.pod_ips {
            match domain.as_str() {
                "" => text.push_str(&format!("{ip}\t{hostname}\n")),
                domain => text.push_str(&format!("{ip}\t{hostname}.{domain}\t{hostname}\n")),
            }
        }
        text
    }
}

/// The lines of spec.hostAliases, which follow all others.
pub(crate) fn of_aliases(aliases: &[HostAlias]) -> String {
    if aliases.is_empty() {
        return String::new();
    }
    let line = |alias: &HostAlias| format!("{}\t{}\n", alias.ip, alias.hostnames.join("\t"));
    let lines: String = aliases.iter().map(line).collect();
    format!("\n# Entries added by HostAliases.\n{lines}")
}

/// The content for a pod on the host's network: the node's own file.
pub(crate) fn host_network(node_file: &str) -> String {
    format!("{HOST_NETWORK_HEADER}{node_file}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pods_own_addresses_follow_kubelets_fixed_lines() {
        let hosts = Hosts {
            pod_ips: vec!["10.1.0.2".parse().unwrap(), "fd00::2".parse().unwrap()],
            hostname: "web".into(),
            domain: String::new(),
        };
        let text = hosts.managed();
        assert!(text.starts_with("# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n"));
        assert!(text.ends_with("fe00::2\tip6-allrouters\n10.1.0.2\tweb\nfd00::2\tweb\n"));
        let text = Hosts { domain: "db.shop.svc".into(), ..hosts }.managed();
        assert!(text.ends_with("10.1.0.2\tweb.db.shop.svc\tweb\nfd00::2\tweb.db.shop.svc\tweb\n"));
    }

    #[test]
    fn aliases_are_lines_of_their_own() {
        let alias = |ip: &str, names: &[&str]| HostAlias {
            ip: ip.to_owned(),
            hostnames: names.iter().map(|name| (*name).to_owned()).collect(),
        };
        assert_eq!(
            of_aliases(&[alias("10.0.0.9", &["a", "b.example"]), alias("::1", &["c"])]),
            "\n# Entries added by HostAliases.\n10.0.0.9\ta\tb.example\n::1\tc\n"
        );
        assert_eq!(of_aliases(&[]), "");
    }

    #[test]
    fn a_host_network_pod_gets_the_nodes_file() {
        assert_eq!(
            host_network("127.0.0.1 localhost\n"),
            "# Kubernetes-managed hosts file (host network).\n127.0.0.1 localhost\n"
        );
    }
}
