//! Reads DNS settings from a `resolv.conf`.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use cni_plugin::Dns;

use crate::Error;

/// `None`: no file, no settings.
pub(crate) fn read(path: Option<&Path>) -> Result<Dns, Error> {
    let Some(path) = path else { return Ok(Dns::default()) };
    let mut file = File::open(path).map_err(|e| Error::disk("open", path, e))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(|e| Error::disk("read", path, e))?;
    Ok(parse(&String::from_utf8_lossy(&bytes)))
}

fn parse(text: &str) -> Dns {
    let mut dns = Dns::default();
    for line in text.lines().map(str::trim) {
        if line.starts_with(['#', ';']) {
            continue;
        }
        let mut words = line.split_whitespace().map(str::to_owned);
        let (Some(key), Some(first)) = (words.next(), words.next()) else { continue };
        match key.as_str() {
            "nameserver" => dns.nameservers.push(first),
            "domain" => dns.domain = first,
            "search" => dns.search.extend(std::iter::once(first).chain(words)),
            "options" => dns.options.extend(std::iter::once(first).chain(words)),
            _ => {}
        }
    }
    dns
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn comments_and_lines_without_value_are_skipped() {
        let dns = parse(
            "# c\n; c\nnameserver 10.0.0.1\nnameserver\n  nameserver ::1 x\nsearch a b\noptions ndots:5\ndomain d e\n",
        );
        assert_eq!(dns.nameservers, ["10.0.0.1", "::1"]);
        assert_eq!((dns.search.len(), dns.options.len(), dns.domain.as_str()), (2, 1, "d"));
    }

    proptest! {
        #[test]
        fn any_text_is_a_resolv_conf(text in "(nameserver|search|options|domain|#|;|x| |\t|\r|\n|\\PC)*") {
            let dns = parse(&text);
            let words = dns.nameservers.iter().chain(&dns.search).chain(&dns.options).chain([&dns.domain]);
            for word in words {
                prop_assert!(!word.contains(char::is_whitespace) && text.contains(word.as_str()));
            }
        }
    }
}
