//! Image names, as users write them and in full.

use std::fmt;

use crate::error::{Error, Result};

const DEFAULT_DOMAIN: &str = "docker.io";
const MAX_LENGTH: usize = 255;

/// A full name: `docker.io/library/demo:latest`, or `...@sha256:...`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Reference {
    /// Domain and path: `docker.io/library/demo`.
    pub(crate) repository: String,
    pub(crate) tag: Option<String>,
    /// `sha256:<64 hex>`.
    pub(crate) digest: Option<String>,
}

impl Reference {
    /// Adds what may be omitted: domain, `library/`, tag.
    pub(crate) fn parse(name: &str) -> Result<Self> {
        let invalid = |problem: &str| Error::invalid(format!("image {name:?}"), problem);
        if name.is_empty() || name.len() > MAX_LENGTH {
            return Err(invalid("invalid reference format: length must be 1 to 255"));
        }
        let (rest, digest) = match name.split_once('@') {
            None => (name, None),
            Some((rest, digest)) if is_digest(digest) => (rest, Some(digest.to_owned())),
            Some(_) => {
                return Err(invalid("invalid reference format: the digest must be sha256:<64 hex digits>"));
            }
        };
        // A colon after the last slash starts the tag; one before belongs to a port.
        let (path, tag) = match rest.rsplit_once(':') {
            Some((path, tag)) if !tag.contains('/') => (path, Some(tag.to_owned())),
            _ => (rest, None),
        };
        if tag.as_deref().is_some_and(|t| !is_tag(t)) {
            return Err(invalid("invalid reference format: bad tag"));
        }
        let (domain, path) = match path.split_once('/') {
            Some((first, rest)) if first.contains(['.', ':']) || first == "localhost" => {
                (first, rest.to_owned())
            }
            Some(_) => (DEFAULT_DOMAIN, path.to_owned()),
            None => (DEFAULT_DOMAIN, format!("library/{path}")),
        };
        let domain = if domain == "index.docker.io" { DEFAULT_DOMAIN } else { domain };
        if !is_domain(domain) {
            return Err(invalid("invalid reference format: bad domain"));
        }
        if !path.split('/').all(is_path_component) {
            return Err(invalid(
                "invalid reference format: repository name must be lowercase letters, digits and separators",
            ));
        }
        let tag = if tag.is_none() && digest.is_none() { Some("latest".to_owned()) } else { tag };
        Ok(Self { repository: format!("{domain}/{path}"), tag, digest })
    }

    /// The name without the digest, if it has a tag.
    pub(crate) fn tagged(&self) -> Option<String> {
        self.tag.as_ref().map(|tag| format!("{}:{tag}", self.repository))
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        if let Some(digest) = &self.digest {
            write!(f, "@{digest}")?;
        }
        Ok(())
    }
}

/// `sha256:` and 64 lower-case hexadecimal digits: also safe as a file name.
pub(crate) fn is_digest(text: &str) -> bool {
    text.strip_prefix("sha256:").is_some_and(is_hex_digest)
}

pub(crate) fn is_hex_digest(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(is_hex_digit)
}

/// `sha256:` and the digits, if `text` can be the first digits of an id: at least three, without `sha256:`, as crictl
/// prints them. A kubelet never asks so for an image of a pod: it adds a tag.
pub(crate) fn beginning_of_id(text: &str) -> Option<String> {
    (text.len() >= 3 && text.bytes().all(is_hex_digit)).then(|| format!("sha256:{text}"))
}

fn is_hex_digit(byte: u8) -> bool {
    matches!(byte, b'0'..=b'9' | b'a'..=b'f')
}

fn is_tag(tag: &str) -> bool {
    !tag.is_empty()
        && tag.len() <= 128
        && !tag.starts_with(['.', '-'])
        && tag.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
}

/// `example.com`, `localhost:5000`, `[fd00::1]:5000`.
fn is_domain(domain: &str) -> bool {
    let (host, port) = match domain.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, port),
        _ => (domain, "0"),
    };
    let is_v6 = host
        .strip_prefix('[')
        .and_then(|h| h.strip_suffix(']'))
        .is_some_and(|h| h.parse::<std::net::Ipv6Addr>().is_ok());
    let is_label = |label: &str| {
        !label.is_empty()
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    port.parse::<u16>().is_ok() && (is_v6 || host.split('.').all(is_label))
}

fn is_path_component(part: &str) -> bool {
    let separator = |b: u8| matches!(b, b'.' | b'_' | b'-');
    !part.is_empty()
        && part.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || separator(b))
        && !separator(part.as_bytes()[0])
        && !separator(part.as_bytes()[part.len() - 1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_names_are_filled_in_as_docker_does() {
        let full = |name: &str| Reference::parse(name).unwrap().to_string();
        assert_eq!(full("demo"), "docker.io/library/demo:latest");
        assert_eq!(full("team/demo:1"), "docker.io/team/demo:1");
        assert_eq!(full("localhost:5000/demo"), "localhost:5000/demo:latest");
        assert_eq!(full("docker.io/library/demo:latest"), "docker.io/library/demo:latest");
        let digest = format!("demo@sha256:{}", "a".repeat(64));
        assert_eq!(full(&digest), format!("docker.io/library/{digest}"));
    }

    #[test]
    fn names_that_docker_refuses_are_refused() {
        for name in ["", "Demo", "a//b", "demo:", "demo:a b", "demo@sha256:12", "../x", "-a"] {
            let err = Reference::parse(name).unwrap_err();
            assert!(err.to_string().contains("invalid reference format"), "{name}: {err}");
        }
    }
}
