//! What is random on each side gets a name that is the same on both: host ends
//! of veth pairs by the container and interface at the other end, hardware
//! addresses by the link that has them.

use std::collections::BTreeMap;

use serde_json::Value;

/// Replacements learned so far in one run of a scenario; what is gone keeps its name.
#[derive(Debug, Default, Clone)]
pub(super) struct Names(BTreeMap<String, String>);

impl Names {
    /// Learns from `ip -j -d addr` of the host and of every container. Texts in
    /// `fixed` are the scenario's own and stay.
    pub(super) fn learn(&mut self, host: &Value, containers: &[(String, Value)], fixed: &str) {
        for (container, links) in containers {
            for link in links.as_array().into_iter().flatten() {
                let Some(peer) = link["link_index"].as_i64() else { continue };
                let host_end = host.as_array().into_iter().flatten().find(|candidate| {
                    candidate["ifindex"] == peer && candidate["linkinfo"]["info_kind"] == "veth"
                });
                let Some(name) = host_end.and_then(|link| link["ifname"].as_str()) else { continue };
                if name.starts_with("veth") {
                    let symbol = format!("<veth {container}.{}>", text(&link["ifname"]));
                    self.0.entry(name.to_owned()).or_insert(symbol);
                }
            }
        }
        let everywhere = containers.iter().map(|(name, links)| (name.as_str(), links));
        for (place, links) in std::iter::once(("host", host)).chain(everywhere) {
            let mut links: Vec<&Value> = links.as_array().into_iter().flatten().collect();
            // A bridge may have its address of a port.
            links.sort_by_key(|link| link["linkinfo"]["info_kind"] == "bridge");
            for link in links {
                let (mac, name) = (text(&link["address"]), self.apply(text(&link["ifname"])));
                let is_random = mac.len() == 17 && mac != "00:00:00:00:00:00" && !fixed.contains(mac);
                if is_random {
                    self.0.entry(mac.to_owned()).or_insert(format!("<mac {place}.{name}>"));
                }
            }
        }
    }

    /// Each replaced text with what stands for it.
    pub(super) fn originals(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(original, symbol)| (original.as_str(), symbol.as_str()))
    }

    /// `text` with every known name replaced, and with what is left of unknown
    /// host ends (of a link that was gone before anybody looked).
    pub(super) fn apply(&self, text: &str) -> String {
        let mut replaced = text.to_owned();
        for (from, to) in &self.0 {
            replaced = replaced.replace(from, to);
        }
        without_unknown_veths(&replaced)
    }
}

/// `veth` and eight hexadecimal digits.
fn without_unknown_veths(text: &str) -> String {
    let mut rest = text;
    let mut replaced = String::new();
    while let Some(at) = rest.find("veth") {
        let (before, found) = rest.split_at(at);
        replaced.push_str(before);
        let digits = found.as_bytes().iter().skip(4).take_while(|byte| byte.is_ascii_hexdigit()).count();
        let (name, after) = found.split_at(4 + if digits == 8 { 8 } else { 0 });
        replaced.push_str(if digits == 8 { "<a veth>" } else { name });
        rest = after;
    }
    replaced + rest
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_host_end_is_named_after_the_container_and_a_hardware_address_after_its_link() {
        let host = json!([
            {"ifindex": 1, "ifname": "lo", "address": "00:00:00:00:00:00"},
            {"ifindex": 5, "ifname": "veth0a1b2c3d", "address": "02:00:00:00:00:05",
             "linkinfo": {"info_kind": "veth"}},
        ]);
        let container =
            json!([{"ifindex": 2, "link_index": 5, "ifname": "eth0", "address": "02:00:00:00:00:02"}]);
        let mut names = Names::default();
        names.learn(&host, &[("c1".to_owned(), container)], "a config with 02:00:00:00:00:99");
        assert_eq!(names.apply("veth0a1b2c3d 02:00:00:00:00:05"), "<veth c1.eth0> <mac host.<veth c1.eth0>>");
        assert_eq!(names.apply("02:00:00:00:00:02 vethffffffff veth"), "<mac c1.eth0> <a veth> veth");
    }
}
