//! The names of a pod in its network: host name and domain (kubernetes, `GeneratePodHostNameAndDomain`).

use crate::objects::Pod;

/// Kubernetes' usual cluster domain. Nothing serves it here: only /etc/hosts has names in it.
const CLUSTER_DOMAIN: &str = "cluster.local";
/// The kernel's limit for a host name, without the terminating NUL.
const MAX_HOSTNAME: usize = 63;
/// kubelet's limit for `setHostnameAsFQDN` (Linux: `__NEW_UTS_LEN`).
const MAX_FQDN: usize = 64;

/// `setHostnameAsFQDN` asks for a name that the kernel refuses.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "setHostnameAsFQDN: the host name {fqdn:?} is too long ({MAX_FQDN} characters is the max, {} characters requested)",
    fqdn.len()
)]
pub(crate) struct TooLong {
    fqdn: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PodNames {
    pub(crate) hostname: String,
    /// `<subdomain>.<namespace>.svc.<cluster domain>`; empty without a subdomain.
    pub(crate) domain: String,
}

impl PodNames {
    pub(crate) fn of(pod: &Pod, node_name: &str) -> Self {
        let wanted = match (pod.spec.host_network, pod.spec.hostname.as_str()) {
            (true, _) => node_name,
            (false, "") => &pod.metadata.name,
            (false, hostname) => hostname,
        };
        let cut: String = wanted.chars().take(MAX_HOSTNAME).collect();
        let domain = match pod.spec.subdomain.as_str() {
            "" => String::new(),
            subdomain => format!("{subdomain}.{}.svc.{CLUSTER_DOMAIN}", pod.metadata.namespace),
        };
        Self { hostname: cut.trim_end_matches(['-', '.']).to_owned(), domain }
    }

    /// What gethostname(2) returns in the pod.
    pub(crate) fn of_kernel(&self, pod: &Pod) -> Result<String, TooLong> {
        if !pod.spec.set_hostname_as_fqdn || self.domain.is_empty() || pod.spec.host_network {
            return Ok(self.hostname.clone());
        }
        let fqdn = format!("{}.{}", self.hostname, self.domain);
        if fqdn.len() > MAX_FQDN { Err(TooLong { fqdn }) } else { Ok(fqdn) }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    fn names(name: &str, spec: serde_json::Value) -> (PodNames, Result<String, TooLong>) {
        let mut whole = json!({"containers": []});
        whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        let pod: Pod = from_value(json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "shop"}, "spec": whole,
        }))
        .unwrap();
        let names = PodNames::of(&pod, "node");
        let of_kernel = names.of_kernel(&pod);
        (names, of_kernel)
    }

    #[test]
    fn the_host_name_is_the_pods_name_unless_the_pod_says_otherwise() {
        let kernels = |name: &str, spec| names(name, spec).1.unwrap();
        assert_eq!(kernels("web", json!({})), "web");
        assert_eq!(kernels("web", json!({"hostname": "other"})), "other");
        assert_eq!(kernels("web", json!({"hostname": "other", "hostNetwork": true})), "node");
        assert_eq!(kernels(&format!("{}-x", "a".repeat(62)), json!({})), "a".repeat(62));
    }

    #[test]
    fn a_subdomain_makes_a_domain_and_if_asked_a_whole_name() {
        let (found, of_kernel) = names("web", json!({"subdomain": "db"}));
        assert_eq!(found.domain, "db.shop.svc.cluster.local");
        assert_eq!(of_kernel.unwrap(), "web");
        let whole = json!({"subdomain": "db", "setHostnameAsFQDN": true});
        assert_eq!(names("web", whole.clone()).1.unwrap(), "web.db.shop.svc.cluster.local");
        let error = names(&"a".repeat(60), whole).1.unwrap_err().to_string();
        assert!(
            error.ends_with("is too long (64 characters is the max, 86 characters requested)"),
            "{error}"
        );
    }
}
