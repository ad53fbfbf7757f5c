//! Which hosts serve the images of a registry: containerd's `hosts.toml`, below a directory of the
//! administrator's.
//!
//! `DIR/<registry>/hosts.toml` describes one registry, `DIR/_default/hosts.toml` all others. The
//! form is that of containerd (docs/hosts.md there). A key that has no effect here is an error.

use std::path::{Path, PathBuf};

use hyper::header::{HeaderName, HeaderValue};
use toml::{Table, Value};

use super::error::{HostsProblem, HostsReason};

type Result<T> = std::result::Result<T, HostsProblem>;

/// The directory of all registries without one of their own.
const DEFAULT: &str = "_default";
/// Limit of a `hosts.toml`.
const MAX_BYTES: u64 = 1 << 20;
/// Limit of the mirrors of one registry.
const MAX_HOSTS: usize = 32;
/// The registry of `docker.io` has another name than its images.
const DOCKER_DOMAIN: &str = "docker.io";
const DOCKER_HOST: &str = "registry-1.docker.io";
const MORE_THAN_ONE_CLIENT: &str = "has more than one certificate, which is not supported";

/// One host to ask, with all its settings.
#[derive(Debug, Clone)]
pub(super) struct Host {
    pub(super) is_https: bool,
    /// Host and port, as in a URL: `registry.example:5000`.
    pub(super) authority: String,
    /// What stands before `/<repository>/manifests/...`; usually `/v2`.
    pub(super) prefix: String,
    /// Whether this is the registry itself. Only it gets the credentials of a pull.
    pub(super) is_registry: bool,
    /// Whether it is asked which digest a tag has.
    pub(super) resolves: bool,
    /// Whether it is asked for what has a digest.
    pub(super) pulls: bool,
    pub(super) tls: TlsFiles,
    pub(super) headers: Vec<(HeaderName, HeaderValue)>,
}

/// The settings of a host's TLS connections. Paths are absolute.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct TlsFiles {
    pub(super) skip_verify: bool,
    /// Certificates of authorities, beside those of the system.
    pub(super) authorities: Vec<PathBuf>,
    /// Certificate and key of the client.
    pub(super) client: Option<(PathBuf, PathBuf)>,
}

/// The hosts of `domain` (`docker.io`, `localhost:5000`), in the order in which to ask them. The last
/// is the registry itself.
pub(super) fn of(dir: &Path, domain: &str) -> Result<Vec<Host>> {
    for name in directory_names(domain) {
        let dir = dir.join(name);
        if dir.is_dir() {
            let file = dir.join("hosts.toml");
            return match std::fs::metadata(&file) {
                Ok(metadata) if metadata.len() > MAX_BYTES => {
                    Err(HostsProblem::of(&file, HostsReason::TooLarge { most: MAX_BYTES }))
                }
                Ok(_) => {
                    let text = std::fs::read_to_string(&file)
                        .map_err(|source| HostsProblem::of(&file, HostsReason::Read { source }))?;
                    parse(&file, &text, domain)
                }
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => certificates_beside(&dir, domain),
                Err(source) => Err(HostsProblem::of(&file, HostsReason::Read { source })),
            };
        }
    }
    Ok(vec![Host::registry(domain)])
}

/// containerd's names of a registry's directory: a colon is not allowed in names everywhere.
fn directory_names(domain: &str) -> Vec<String> {
    let mut names = Vec::new();
    if let Some((host, port)) = domain.rsplit_once(':').filter(|(_, port)| !port.ends_with(']')) {
        names.push(format!("{host}_{port}_"));
    }
    names.push(domain.to_owned());
    names.push(DEFAULT.to_owned());
    names
}

impl Host {
    /// The registry itself, without a configuration: by https alone.
    fn registry(domain: &str) -> Self {
        let authority = if domain == DOCKER_DOMAIN { DOCKER_HOST } else { domain };
        Self {
            is_https: true,
            authority: authority.to_owned(),
            prefix: "/v2".to_owned(),
            is_registry: true,
            resolves: true,
            pulls: true,
            tls: TlsFiles::default(),
            headers: Vec::new(),
        }
    }
}

/// Docker's form, without a `hosts.toml`: `*.crt` are authorities, `*.cert` and `*.key` a client.
fn certificates_beside(dir: &Path, domain: &str) -> Result<Vec<Host>> {
    let read = |source| HostsProblem::of(dir, HostsReason::Read { source });
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(read)? {
        files.push(entry.map_err(read)?.path());
    }
    files.sort();
    let mut host = Host::registry(domain);
    for file in files {
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("crt") => host.tls.authorities.push(file),
            Some("cert") => {
                let key = file.with_extension("key");
                if host.tls.client.replace((file, key)).is_some() {
                    return Err(Reader { file: dir }.wrong("*.cert", MORE_THAN_ONE_CLIENT));
                }
            }
            _ => {}
        }
    }
    Ok(vec![host])
}

fn parse(file: &Path, text: &str, domain: &str) -> Result<Vec<Host>> {
    let mut root: Table = text.parse().map_err(|e: toml::de::Error| {
        HostsProblem::of(file, HostsReason::Toml { message: e.message().to_owned() })
    })?;
    let reader = Reader { file };
    let mut hosts = Vec::new();
    match root.remove("host") {
        None => {}
        Some(Value::Table(mirrors)) if mirrors.len() <= MAX_HOSTS => {
            for (url, settings) in mirrors {
                let field = format!("host.{url:?}");
                let Value::Table(settings) = settings else {
                    return Err(reader.wrong(&field, "is not a table"));
                };
                let mut host = reader.address(&field, &url)?;
                host.is_registry = is_same_registry(&host, domain);
                reader.settings(&field, settings, &mut host)?;
                hosts.push(host);
            }
        }
        Some(Value::Table(_)) => {
            return Err(reader.wrong("host", &format!("has more than {MAX_HOSTS} entries")));
        }
        Some(_) => return Err(reader.wrong("host", "is not a table")),
    }
    let mut registry = match root.remove("server") {
        None => Host::registry(domain),
        Some(Value::String(url)) => reader.address("server", &url)?,
        Some(_) => return Err(reader.wrong("server", "is not a URL")),
    };
    // The server of all registries without a file of their own is another party.
    let is_default = file.parent().and_then(Path::file_name).is_some_and(|name| name == DEFAULT);
    registry.is_registry = !is_default || is_same_registry(&registry, domain);
    reader.settings("", root, &mut registry)?;
    hosts.push(registry);
    Ok(hosts)
}

/// A registry may be listed as a mirror of itself, with settings of its own.
fn is_same_registry(host: &Host, domain: &str) -> bool {
    host.authority == domain || host.authority == Host::registry(domain).authority
}

struct Reader<'a> {
    file: &'a Path,
}

impl Reader<'_> {
    fn wrong(&self, field: &str, problem: &str) -> HostsProblem {
        HostsProblem::of(
            self.file,
            HostsReason::Field { field: field.to_owned(), problem: problem.to_owned() },
        )
    }

    /// A host without settings from its URL; https where the URL has no scheme.
    fn address(&self, field: &str, url: &str) -> Result<Host> {
        let wrong = |problem: &str| self.wrong(field, problem);
        let full = if url.contains("://") { url.to_owned() } else { format!("https://{url}") };
        let uri: hyper::Uri = full.parse().map_err(|_| wrong("is not a URL"))?;
        let is_https = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(wrong("is neither an http nor an https URL")),
        };
        let authority = uri.authority().ok_or_else(|| wrong("has no host"))?;
        if authority.as_str().contains('@') {
            return Err(wrong("has a user: put an authorization into header"));
        }
        if uri.query().is_some() {
            return Err(wrong("has a query"));
        }
        Ok(Host {
            is_https,
            authority: authority.as_str().to_owned(),
            prefix: uri.path().trim_end_matches('/').to_owned(),
            is_registry: false,
            ..Host::registry(authority.as_str())
        })
    }

    fn settings(&self, field: &str, settings: Table, host: &mut Host) -> Result<()> {
        let mut is_override = false;
        for (key, value) in settings {
            let name = if field.is_empty() { key.clone() } else { format!("{field}.{key}") };
            match (key.as_str(), value) {
                ("capabilities", Value::Array(all)) => {
                    (host.resolves, host.pulls) = self.capabilities(&name, &all)?;
                }
                ("skip_verify", Value::Boolean(skip)) => host.tls.skip_verify = skip,
                ("override_path", Value::Boolean(chosen)) => is_override = chosen,
                ("ca", value) => host.tls.authorities = self.paths(&name, value)?,
                ("client", value) => host.tls.client = self.client(&name, value)?,
                ("header", Value::Table(all)) => host.headers = self.headers(&name, all)?,
                ("capabilities" | "skip_verify" | "override_path" | "header", _) => {
                    return Err(self.wrong(&name, "has the wrong type"));
                }
                _ => return Err(self.wrong(&name, "is not supported")),
            }
        }
        if !is_override && !host.prefix.ends_with("/v2") {
            host.prefix.push_str("/v2");
        }
        Ok(())
    }

    fn capabilities(&self, field: &str, all: &[Value]) -> Result<(bool, bool)> {
        let (mut resolves, mut pulls) = (false, false);
        for capability in all {
            match capability.as_str() {
                Some("resolve") => resolves = true,
                Some("pull") => pulls = true,
                // Of containerd; this runtime never pushes.
                Some("push" | "referrers") => {}
                Some(other) => return Err(self.wrong(field, &format!("{other:?} is not supported"))),
                None => return Err(self.wrong(field, "has the wrong type")),
            }
        }
        Ok((resolves, pulls))
    }

    /// Relative paths begin at the directory of the file.
    fn path(&self, field: &str, value: &Value) -> Result<PathBuf> {
        let path = value.as_str().filter(|path| !path.is_empty());
        let path = path.ok_or_else(|| self.wrong(field, "is not a path"))?;
        Ok(self.file.parent().unwrap_or(Path::new("/")).join(path))
    }

    fn paths(&self, field: &str, value: Value) -> Result<Vec<PathBuf>> {
        match value {
            Value::Array(all) => all.iter().map(|value| self.path(field, value)).collect(),
            one => Ok(vec![self.path(field, &one)?]),
        }
    }

    /// One file with both, or a list of one such file or of one pair.
    fn client(&self, field: &str, value: Value) -> Result<Option<(PathBuf, PathBuf)>> {
        let both = |value: &Value| self.path(field, value).map(|path| Some((path.clone(), path)));
        let Value::Array(all) = value else { return both(&value) };
        match all.as_slice() {
            [] => Ok(None),
            [Value::Array(pair)] if pair.len() == 2 => {
                Ok(Some((self.path(field, &pair[0])?, self.path(field, &pair[1])?)))
            }
            [Value::Array(_)] => Err(self.wrong(field, "has a pair that is not certificate and key")),
            [one] => both(one),
            _ => Err(self.wrong(field, MORE_THAN_ONE_CLIENT)),
        }
    }

    fn headers(&self, field: &str, all: Table) -> Result<Vec<(HeaderName, HeaderValue)>> {
        let mut headers = Vec::new();
        for (name, value) in all {
            let field = format!("{field}.{name}");
            let header = HeaderName::try_from(name.as_str());
            let header = header.map_err(|_| self.wrong(&field, "is not the name of a header"))?;
            let values = match value {
                Value::Array(values) => values,
                one => vec![one],
            };
            for value in values {
                let text = value.as_str().and_then(|text| HeaderValue::from_str(text).ok());
                let mut text = text.ok_or_else(|| self.wrong(&field, "is not the value of a header"))?;
                // It may be a password: `Debug` does not show it.
                text.set_sensitive(true);
                headers.push((header.clone(), text));
            }
        }
        Ok(headers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::chain;

    fn parsed(text: &str, domain: &str) -> Result<Vec<Host>> {
        parse(Path::new("/certs.d/x/hosts.toml"), text, domain)
    }

    fn shown(hosts: &[Host]) -> Vec<String> {
        let url = |host: &Host| {
            let scheme = if host.is_https { "https" } else { "http" };
            format!("{scheme}://{}{}", host.authority, host.prefix)
        };
        hosts.iter().map(url).collect()
    }

    #[test]
    fn mirrors_come_in_their_order_and_the_registry_last() {
        let text = r#"
            server = "https://registry-1.docker.io"
            [host."https://z.example/cache"]
            capabilities = ["pull", "resolve", "push"]
            [host."http://a.example:5000"]
            capabilities = ["pull"]
            [host."https://o.example/whole/path"]
            override_path = true
        "#;
        let hosts = parsed(text, "docker.io").unwrap();
        let expected = [
            "https://z.example/cache/v2",
            "http://a.example:5000/v2",
            "https://o.example/whole/path",
            "https://registry-1.docker.io/v2",
        ];
        assert_eq!(shown(&hosts), expected);
        assert_eq!(hosts.iter().map(|host| host.resolves).collect::<Vec<_>>(), [true, false, true, true]);
        assert_eq!(
            hosts.iter().map(|host| host.is_registry).collect::<Vec<_>>(),
            [false, false, false, true]
        );
    }

    #[test]
    fn a_registry_without_a_file_is_asked_by_https() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(shown(&of(dir.path(), "docker.io").unwrap()), ["https://registry-1.docker.io/v2"]);
        assert_eq!(shown(&of(dir.path(), "localhost:5000").unwrap()), ["https://localhost:5000/v2"]);
    }

    #[test]
    fn a_directory_is_found_by_port_by_name_and_by_default() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, server: &str| {
            std::fs::create_dir_all(dir.path().join(name)).unwrap();
            let text = format!("server = \"http://{server}\"");
            std::fs::write(dir.path().join(name).join("hosts.toml"), text).unwrap();
        };
        write("_default", "default");
        let found = |domain: &str| shown(&of(dir.path(), domain).unwrap()).remove(0);
        assert_eq!(found("r.example:5000"), "http://default/v2");
        write("r.example:5000", "colon");
        assert_eq!(found("r.example:5000"), "http://colon/v2");
        write("r.example_5000_", "escaped");
        assert_eq!(found("r.example:5000"), "http://escaped/v2");
        assert_eq!(found("r.example"), "http://default/v2");
        // Only the registry itself gets credentials.
        let is_registry = |domain: &str| of(dir.path(), domain).unwrap()[0].is_registry;
        let domains = ["r.example:5000", "r.example", "default"];
        assert_eq!(domains.map(is_registry), [true, false, true]);
    }

    #[test]
    fn files_of_tls_begin_at_the_directory_of_the_configuration() {
        let text = r#"
            ca = "ca.pem"
            client = [["c.cert", "/keys/c.key"]]
            [host."https://m.example"]
            skip_verify = true
            ca = ["/a.pem", "b.pem"]
            client = "both.pem"
            header.authorization = "Basic Zm9v"
        "#;
        let hosts = parsed(text, "r.example").unwrap();
        let dir = Path::new("/certs.d/x");
        assert_eq!(hosts[0].tls.authorities, [PathBuf::from("/a.pem"), dir.join("b.pem")]);
        assert!(hosts[0].tls.skip_verify && !hosts[1].tls.skip_verify);
        assert_eq!(hosts[1].tls.authorities, [dir.join("ca.pem")]);
        assert_eq!(hosts[0].tls.client, Some((dir.join("both.pem"), dir.join("both.pem"))));
        assert_eq!(hosts[1].tls.client, Some((dir.join("c.cert"), "/keys/c.key".into())));
        assert!(!format!("{:?}", hosts[0]).contains("Zm9v"), "a header may be a password");
    }

    #[test]
    fn certificates_without_a_configuration_are_read_as_docker_does() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("r.example");
        std::fs::create_dir(&own).unwrap();
        for name in ["ca.crt", "client.cert", "client.key"] {
            std::fs::write(own.join(name), "").unwrap();
        }
        let hosts = of(dir.path(), "r.example").unwrap();
        assert_eq!(hosts[0].tls.authorities, [own.join("ca.crt")]);
        assert_eq!(hosts[0].tls.client, Some((own.join("client.cert"), own.join("client.key"))));
    }

    #[test]
    fn what_has_no_effect_is_refused_by_name() {
        let refused = [
            ("dial_timeout = \"1s\"", "dial_timeout is not supported"),
            ("[host.\"https://m\"]\nfoo = 1", "host.\"https://m\".foo is not supported"),
            ("skip_verify = \"yes\"", "skip_verify has the wrong type"),
            ("capabilities = [\"teleport\"]", "capabilities \"teleport\" is not supported"),
            ("server = \"ftp://x\"", "server is neither an http nor an https URL"),
            ("server = \"https://me:secret@x\"", "server has a user: put an authorization into header"),
            ("[host]\n\"https://m\" = 1", "host.\"https://m\" is not a table"),
            ("client = [\"a\", \"b\"]", "client has more than one certificate, which is not supported"),
            ("client = [[\"a\"]]", "client has a pair that is not certificate and key"),
        ];
        for (text, problem) in refused {
            let error = chain(&parsed(text, "r.example").unwrap_err());
            assert_eq!(error, format!("/certs.d/x/hosts.toml: {problem}"));
        }
        let error = chain(&parsed("server = ", "r.example").unwrap_err());
        assert!(error.starts_with("/certs.d/x/hosts.toml: not TOML: "), "{error}");
    }
}
