//! Credentials for images, from Secrets of the types kubernetes.io/dockerconfigjson and
//! kubernetes.io/dockercfg, chosen as kubelet chooses them (kubernetes, pkg/credentialprovider:
//! `config.go`, `keyring.go`).

use std::collections::BTreeMap;
use std::fmt;

use base64::Engine;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use proto::cri::AuthConfig;
use serde::Deserialize;

/// Type of a Secret, and its key.
const DOCKER_CONFIG_JSON: (&str, &str) = ("kubernetes.io/dockerconfigjson", ".dockerconfigjson");
const DOCKER_CFG: (&str, &str) = ("kubernetes.io/dockercfg", ".dockercfg");
/// Tried for one image.
const MOST_LOGINS: usize = 16;
/// The key that Docker writes for its own registry.
const DEFAULT_REGISTRY: &str = "index.docker.io";
/// Files of Docker's have `=` at the end, or not.
const ANY_PADDING: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Users and passwords by registry, with or without a path: `registry.example/team`.
#[derive(Default, PartialEq, Eq)]
pub(super) struct Keyring(BTreeMap<String, Vec<Login>>);

#[derive(Clone, PartialEq, Eq)]
struct Login {
    user: String,
    password: String,
}

/// Never with a value of the Secret.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Problem {
    #[error("type {found:?} is neither {} nor {}", DOCKER_CONFIG_JSON.0, DOCKER_CFG.0)]
    Type { found: String },
    #[error("data has no key {key:?}")]
    NoKey { key: &'static str },
    #[error("{key} is not a configuration of Docker: line {line} column {column}")]
    Json { key: &'static str, line: usize, column: usize },
    #[error("auth of {registry:?} is not the Base64 form of USER:PASSWORD")]
    Auth { registry: String },
}

#[derive(Deserialize)]
struct ConfigJson {
    #[serde(default)]
    auths: BTreeMap<String, Entry>,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(default)]
    username: String,
    #[serde(default)]
    password: String,
    #[serde(default)]
    auth: String,
}

/// The registries only.
impl fmt::Debug for Keyring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

impl Keyring {
    /// Adds the logins of one Secret: its type and its data.
    pub(super) fn add<'a>(
        &mut self,
        secret_type: &str,
        data: impl IntoIterator<Item = (&'a str, &'a [u8])>,
    ) -> Result<(), Problem> {
        let (is_whole, wanted) = match secret_type {
            of if of == DOCKER_CONFIG_JSON.0 => (true, DOCKER_CONFIG_JSON.1),
            of if of == DOCKER_CFG.0 => (false, DOCKER_CFG.1),
            other => return Err(Problem::Type { found: other.to_owned() }),
        };
        let content = data.into_iter().find(|(key, _)| *key == wanted);
        let (_, content) = content.ok_or(Problem::NoKey { key: wanted })?;
        // The parser's own message would quote the content.
        let invalid =
            |e: serde_json::Error| Problem::Json { key: wanted, line: e.line(), column: e.column() };
        let entries: BTreeMap<String, Entry> = if is_whole {
            serde_json::from_slice::<ConfigJson>(content).map_err(invalid)?.auths
        } else {
            serde_json::from_slice(content).map_err(invalid)?
        };
        let mut found = Vec::new();
        for (registry, entry) in entries {
            let login = login(entry).ok_or_else(|| Problem::Auth { registry: registry.clone() })?;
            found.push((key_of(&registry), login));
        }
        for (key, login) in found {
            self.0.entry(key).or_default().push(login);
        }
        Ok(())
    }

    /// The logins for an image as a pod names it, the best first: the longest matching registry and
    /// path, then the others.
    pub(super) fn lookup(&self, image: &str) -> Vec<AuthConfig> {
        let image = &repository(image);
        let mut found: Vec<&Login> = Vec::new();
        // In kubelet's order: by text, backwards, so that longer paths come before their beginning.
        for (key, logins) in self.0.iter().rev() {
            if is_match(key, image) {
                found.extend(logins);
            }
        }
        if found.is_empty() && is_of_default_registry(image) {
            found.extend(self.0.get(DEFAULT_REGISTRY).into_iter().flatten());
        }
        let auth = |login: &Login| AuthConfig {
            username: login.user.clone(),
            password: login.password.clone(),
            ..AuthConfig::default()
        };
        let mut logins: Vec<&Login> = Vec::new();
        for login in found {
            if logins.len() == MOST_LOGINS {
                break;
            }
            if !logins.contains(&login) {
                logins.push(login);
            }
        }
        logins.into_iter().map(auth).collect()
    }
}

/// `auth` wins over user and password.
fn login(entry: Entry) -> Option<Login> {
    if entry.auth.is_empty() {
        return Some(Login { user: entry.username, password: entry.password });
    }
    let decoded = String::from_utf8(ANY_PADDING.decode(entry.auth.trim()).ok()?).ok()?;
    let (user, password) = decoded.split_once(':')?;
    Some(Login { user: user.to_owned(), password: password.to_owned() })
}

/// Host, port and path. `/v1/` and `/v2/` stand for the whole registry.
fn key_of(registry: &str) -> String {
    let rest = registry.strip_prefix("https://").or_else(|| registry.strip_prefix("http://"));
    let rest = rest.unwrap_or(registry);
    let (host, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
    let path = match path {
        path if path.starts_with("/v1/") || path.starts_with("/v2/") => &path[3..],
        path => path,
    };
    if path == "/" { host.to_owned() } else { format!("{host}{path}") }
}

/// Host by host, label by label, with `*` and `?`; the port must be the same, and the path a prefix.
fn is_match(key: &str, image: &str) -> bool {
    let split = |text: &str| {
        let (host, path) = text.find('/').map_or((text, ""), |at| text.split_at(at));
        let (host, port) = host.rsplit_once(':').unwrap_or((host, ""));
        (host.to_owned(), port.to_owned(), path.to_owned())
    };
    let ((globs, glob_port, prefix), (host, port, path)) = (split(key), split(image));
    let globs: Vec<&str> = globs.split('.').collect();
    let labels: Vec<&str> = host.split('.').collect();
    glob_port == port
        && globs.len() == labels.len()
        && path.starts_with(&prefix)
        && globs.iter().zip(&labels).all(|(glob, label)| is_glob_match(glob.as_bytes(), label.as_bytes()))
}

/// `*` is any text, `?` any letter. Go's classes (`[a-z]`) are not understood.
fn is_glob_match(glob: &[u8], text: &[u8]) -> bool {
    // Where to continue after the last `*`: in the pattern, and in the text if it takes one more letter.
    let mut star = None;
    let (mut at, mut from) = (0, 0);
    while from < text.len() {
        match glob.get(at) {
            Some(b'*') => {
                star = Some((at + 1, from));
                at += 1;
            }
            Some(letter) if *letter == b'?' || *letter == text[from] => (at, from) = (at + 1, from + 1),
            _ => match star {
                Some((after, taken)) => {
                    star = Some((after, taken + 1));
                    (at, from) = (after, taken + 1);
                }
                None => return false,
            },
        }
    }
    glob[at..].iter().all(|letter| *letter == b'*')
}

fn is_of_default_registry(repository: &str) -> bool {
    repository.starts_with("docker.io/") || repository.starts_with("index.docker.io/")
}

/// The name with its domain, without tag and digest: `docker.io/library/demo`.
fn repository(image: &str) -> String {
    let name = image.split('@').next().unwrap_or(image);
    let name = match name.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => name,
        _ => name,
    };
    match name.split_once('/') {
        Some((domain, _)) if domain.contains(['.', ':']) || domain == "localhost" => name.to_owned(),
        Some(_) => format!("docker.io/{name}"),
        None => format!("docker.io/library/{name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keyring(auths: &str) -> Keyring {
        let mut keyring = Keyring::default();
        let json = format!("{{\"auths\": {auths}}}");
        keyring.add(DOCKER_CONFIG_JSON.0, [(".dockerconfigjson", json.as_bytes())]).unwrap();
        keyring
    }

    fn users(keyring: &Keyring, image: &str) -> Vec<String> {
        keyring.lookup(image).into_iter().map(|auth| auth.username).collect()
    }

    #[test]
    fn the_longest_path_comes_first_and_then_the_others() {
        let keyring = keyring(
            r#"{
                "r.example": {"username": "whole", "password": "1"},
                "https://r.example/team": {"username": "team", "password": "2"},
                "r.example/team/app": {"username": "app", "password": "3"},
                "r.example:5000": {"username": "port", "password": "4"}
            }"#,
        );
        assert_eq!(users(&keyring, "r.example/team/app/web"), ["app", "team", "whole"]);
        assert_eq!(users(&keyring, "r.example/other"), ["whole"]);
        assert_eq!(users(&keyring, "r.example:5000/other"), ["port"]);
        assert_eq!(users(&keyring, "x.r.example/other"), Vec::<String>::new());
        assert_eq!(keyring.lookup("r.example/other")[0].password, "1");
    }

    #[test]
    fn hosts_are_matched_label_by_label() {
        let keyring =
            keyring(r#"{"*.r.example": {"username": "any"}, "a?c*e.r.example": {"username": "some"}}"#);
        assert_eq!(users(&keyring, "b.r.example/x"), ["any"]);
        assert_eq!(users(&keyring, "abcdde.r.example/x"), ["some", "any"]);
        assert_eq!(users(&keyring, "a.b.r.example/x"), Vec::<String>::new());
        assert_eq!(users(&keyring, "r.example/x"), Vec::<String>::new());
    }

    #[test]
    fn the_registry_of_docker_has_several_names() {
        let keyring = keyring(r#"{"https://index.docker.io/v1/": {"auth": "YW5uYTpzZWNyZXQ6eA"}}"#);
        for image in ["demo:1", "library/demo", "docker.io/library/demo", "index.docker.io/library/demo@x"] {
            let found = keyring.lookup(image);
            assert_eq!(
                (found[0].username.as_str(), found[0].password.as_str()),
                ("anna", "secret:x"),
                "{image}"
            );
        }
        assert_eq!(users(&keyring, "localhost:5000/demo"), Vec::<String>::new());
    }

    #[test]
    fn an_image_is_looked_up_by_its_whole_name() {
        let keyring =
            keyring(r#"{"docker.io/team": {"username": "team"}, "r.example:5000": {"username": "r"}}"#);
        assert_eq!(users(&keyring, "team/app:1"), ["team"]);
        assert_eq!(users(&keyring, "other/app"), Vec::<String>::new());
        assert_eq!(users(&keyring, "r.example:5000/app:1"), ["r"]);
    }

    #[test]
    fn the_older_type_has_the_registries_alone() {
        let mut keyring = Keyring::default();
        let json = br#"{"r.example": {"username": "u", "password": "p", "auth": "YTpi", "email": "e"}}"#;
        keyring.add(DOCKER_CFG.0, [("other", &b""[..]), (".dockercfg", json)]).unwrap();
        assert_eq!(users(&keyring, "r.example/x"), ["a"]);
    }

    #[test]
    fn a_problem_names_the_place_and_no_value() {
        let mut keyring = Keyring::default();
        let mut problem = |secret_type: &str, key: &str, content: &str| {
            keyring.add(secret_type, [(key, content.as_bytes())]).unwrap_err().to_string()
        };
        assert_eq!(
            problem("Opaque", "a", "{}"),
            "type \"Opaque\" is neither kubernetes.io/dockerconfigjson nor kubernetes.io/dockercfg"
        );
        assert_eq!(problem(DOCKER_CFG.0, "a", "{}"), "data has no key \".dockercfg\"");
        let invalid = problem(DOCKER_CONFIG_JSON.0, DOCKER_CONFIG_JSON.1, "{\"auths\": {\"r\": \"geheim\"}}");
        assert!(
            invalid.starts_with(".dockerconfigjson is not a configuration of Docker: line 1 "),
            "{invalid}"
        );
        assert!(!invalid.contains("geheim"));
        let auth =
            problem(DOCKER_CONFIG_JSON.0, DOCKER_CONFIG_JSON.1, r#"{"auths": {"r": {"auth": "geheim!"}}}"#);
        assert_eq!(auth, "auth of \"r\" is not the Base64 form of USER:PASSWORD");
        assert_eq!(keyring, Keyring::default(), "nothing of a broken Secret is used");
    }
}
