//! Limits of a pod's network traffic, from its annotations. The CNI plugin `bandwidth`, or one that understands its
//! capability, enforces them.

use proto::cri::PodSandboxConfig;
use quantity::Quantity;
use serde_json::{Map, Value, json};

use crate::error::{Error, Result};

/// The annotation, and the capability's keys of rate and burst.
const LIMITS: [(&str, &str, &str); 2] = [
    ("kubernetes.io/ingress-bandwidth", "ingressRate", "ingressBurst"),
    ("kubernetes.io/egress-bandwidth", "egressRate", "egressBurst"),
];
/// Bits, as with containerd: in effect no limit.
const BURST: u32 = u32::MAX;
/// Bits per second, as kubelet and containerd have them.
const LOWEST_RATE: u64 = 1_000;
const HIGHEST_RATE: u64 = 1_000_000_000_000_000;

/// The value of the capability `bandwidth`; `None` for a pod without limits.
pub(crate) fn capability(config: &PodSandboxConfig) -> Result<Option<Value>> {
    let mut limits = Map::new();
    for (annotation, rate_key, burst_key) in LIMITS {
        if let Some(text) = config.annotations.get(annotation) {
            limits.insert(rate_key.to_owned(), json!(rate(annotation, text)?));
            limits.insert(burst_key.to_owned(), json!(BURST));
        }
    }
    Ok((!limits.is_empty()).then_some(Value::Object(limits)))
}

fn rate(annotation: &str, text: &str) -> Result<u64> {
    let invalid = |problem| Error::invalid(format!("config.annotations[{annotation}]"), problem);
    let rate = text.parse::<Quantity>().map_err(|error| invalid(error.to_string()))?.value();
    if (LOWEST_RATE..=HIGHEST_RATE).contains(&rate) {
        return Ok(rate);
    }
    Err(invalid(format!("{text:?}: must be 1k to 1P bits per second")))
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn limits(annotations: &[(&str, &str)]) -> Result<Option<Value>> {
        let annotations = annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        capability(&PodSandboxConfig { annotations: HashMap::from_iter(annotations), ..Default::default() })
    }

    #[test]
    fn rates_are_bits_per_second_and_a_missing_one_is_no_limit() {
        assert_eq!(limits(&[("other", "1")]).unwrap(), None);
        assert_eq!(
            limits(&[("kubernetes.io/ingress-bandwidth", "10M"), ("kubernetes.io/egress-bandwidth", "1P")])
                .unwrap(),
            Some(json!({
                "ingressRate": 10_000_000, "ingressBurst": 4_294_967_295_u32,
                "egressRate": 1_000_000_000_000_000_u64, "egressBurst": 4_294_967_295_u32,
            }))
        );
        assert_eq!(
            limits(&[("kubernetes.io/egress-bandwidth", "1k")]).unwrap(),
            Some(json!({"egressRate": 1000, "egressBurst": 4_294_967_295_u32}))
        );
    }

    #[test]
    fn a_rate_out_of_kubelets_range_is_refused_with_its_annotation() {
        for bad in ["999", "-1M", "1001T", "10Mbit", ""] {
            let error = limits(&[("kubernetes.io/egress-bandwidth", bad)]).unwrap_err().to_string();
            let text = error.strip_prefix("config.annotations[kubernetes.io/egress-bandwidth]: ").unwrap();
            assert!(text.contains(&format!("{bad:?}")), "{text}");
        }
    }
}
