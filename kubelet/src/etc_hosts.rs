//! /etc/hosts of a pod's containers: a file in the pod's directory, rewritten at each container
//! start and mounted over the image's.

use std::net::IpAddr;

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
}

impl Hosts {
    /// The content for a pod with its own network.
    pub(crate) fn managed(&self) -> String {
        let mut text = format!("{HEADER}{FIXED}");
        for ip in &self.pod_ips {
            text.push_str(&format!("{ip}\t{}\n", self.hostname));
        }
        text
    }
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
        };
        let text = hosts.managed();
        assert!(text.starts_with("# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n"));
        assert!(text.ends_with("fe00::2\tip6-allrouters\n10.1.0.2\tweb\nfd00::2\tweb\n"));
    }

    #[test]
    fn a_host_network_pod_gets_the_nodes_file() {
        assert_eq!(
            host_network("127.0.0.1 localhost\n"),
            "# Kubernetes-managed hosts file (host network).\n127.0.0.1 localhost\n"
        );
    }
}
