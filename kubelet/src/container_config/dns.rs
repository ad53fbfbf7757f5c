//! The content of a pod's resolv.conf. The kubelet sends it as CRI DNSConfig; the runtime writes
//! the file.

use std::path::Path;

use proto::cri::DnsConfig;

/// The C library's limit.
const MAX_SERVERS: usize = 3;
const MAX_SEARCHES: usize = 32;
const MAX_SEARCH_CHARS: usize = 2048;

/// The node's own settings: policy `Default`, and `ClusterFirst` without a cluster. A missing file
/// gives an empty configuration.
pub(crate) fn of_node(resolv_conf: &Path) -> std::io::Result<DnsConfig> {
    match std::fs::read_to_string(resolv_conf) {
        Ok(text) => Ok(limited(parse(&text))),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(DnsConfig::default()),
        Err(e) => Err(e),
    }
}

/// Appends `more` (spec.dnsConfig) to `base` without duplicates; options in `more` replace those of
/// the same name.
pub(crate) fn merged(base: DnsConfig, more: DnsConfig) -> DnsConfig {
    let mut out = base;
    let add = |to: &mut Vec<String>, from: Vec<String>| {
        for item in from {
            if !to.contains(&item) {
                to.push(item);
            }
        }
    };
    add(&mut out.servers, more.servers);
    add(&mut out.searches, more.searches);
    let name = |option: &str| option.split(':').next().unwrap_or_default().to_owned();
    out.options.retain(|o| !more.options.iter().any(|m| name(m) == name(o)));
    add(&mut out.options, more.options);
    limited(out)
}

fn parse(text: &str) -> DnsConfig {
    let mut config = DnsConfig::default();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("nameserver") => config.servers.extend(words.next().map(str::to_owned)),
            // The last `search` line is effective (resolv.conf(5)).
            Some("search") => config.searches = words.map(str::to_owned).collect(),
            Some("options") => config.options.extend(words.map(str::to_owned)),
            _ => {}
        }
    }
    config
}

fn limited(mut config: DnsConfig) -> DnsConfig {
    config.servers.truncate(MAX_SERVERS);
    config.searches.truncate(MAX_SEARCHES);
    while config.searches.join(" ").len() > MAX_SEARCH_CHARS {
        config.searches.pop();
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nodes_file_is_parsed_and_cut_to_the_resolvers_limits() {
        let text = "# comment\nsearch old\nnameserver 10.0.0.1\nnameserver 10.0.0.2\n\
                    nameserver 10.0.0.3\nnameserver 10.0.0.4\nsearch a.example b.example\noptions ndots:2 edns0\n";
        let config = limited(parse(text));
        assert_eq!(config.servers, ["10.0.0.1", "10.0.0.2", "10.0.0.3"]);
        assert_eq!(config.searches, ["a.example", "b.example"]);
        assert_eq!(config.options, ["ndots:2", "edns0"]);
    }

    #[test]
    fn a_pods_own_options_replace_those_of_the_same_name() {
        let base = parse("nameserver 10.0.0.1\noptions ndots:2 edns0\n");
        let more = DnsConfig {
            servers: vec!["10.0.0.1".into(), "10.0.0.9".into()],
            searches: vec![],
            options: vec!["ndots:5".into()],
        };
        let config = merged(base, more);
        assert_eq!(config.servers, ["10.0.0.1", "10.0.0.9"]);
        assert_eq!(config.options, ["edns0", "ndots:5"]);
    }
}
