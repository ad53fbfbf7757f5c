//! The secrets of CSI calls: which Secret a class or volume names for a call, and its content.
//!
//! Invariant: values are read from the store for each call, and only the request has them. Volumes
//! and records name the Secret.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use crate::objects::SecretReference;
use crate::store::Store;

/// Prefix of parameters for Kubernetes' parts, which a driver does not get.
pub(crate) const RESERVED_PREFIX: &str = "csi.storage.k8s.io/";

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("secret \"{namespace}/{name}\" of the CSI call not found: apply it")]
    Missing { namespace: String, name: String },
    #[error(
        "secret \"{namespace}/{name}\" of the CSI call: the value of key {key:?} is not UTF-8, which CSI requires"
    )]
    NotText { namespace: String, name: String, key: String },
    #[error("parameter {found} needs {missing} beside it")]
    HalfNamed { found: String, missing: String },
    #[error("parameter {key}: {template:?} has an unknown or unclosed token")]
    Template { key: String, template: String },
    #[error("parameter {key}: {value:?} is not a valid name of a {of}")]
    Name { key: String, value: String, of: &'static str },
}

/// The secrets of one call. `Debug` shows their number only.
#[derive(Clone, Default, PartialEq, Eq)]
pub(crate) struct Secrets(HashMap<String, String>);

impl Secrets {
    /// Reads the Secret that `reference` names; empty without a reference.
    pub(crate) fn read(store: &Store, reference: Option<&SecretReference>) -> Result<Self, Error> {
        let Some(SecretReference { name, namespace }) = reference else { return Ok(Self::default()) };
        let (name, namespace) = (name.clone(), namespace.clone());
        let Some(secret) = store.secret(&namespace, &name) else {
            return Err(Error::Missing { namespace, name });
        };
        let mut values = HashMap::new();
        for (key, value) in &secret.data {
            let Ok(text) = String::from_utf8(value.0.clone()) else {
                return Err(Error::NotText { namespace, name, key: key.clone() });
            };
            values.insert(key.clone(), text);
        }
        Ok(Self(values))
    }

    pub(crate) fn into_map(self) -> HashMap<String, String> {
        self.0
    }
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Secrets({})", self.0.len())
    }
}

/// Which secret of a class's parameters. Each has the keys `<word>-name` and `<word>-namespace`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    Provision,
    ControllerPublish,
    NodeStage,
    NodePublish,
    ControllerExpand,
    NodeExpand,
    Snapshot,
}

/// Secrets of volumes without keys of their own.
const DEFAULT: &str = "secret";
/// The other reserved parameters of a StorageClass.
pub(crate) const FS_TYPE: &str = "csi.storage.k8s.io/fstype";

impl Purpose {
    const OF_VOLUMES: [Self; 6] = [
        Self::Provision,
        Self::ControllerPublish,
        Self::NodeStage,
        Self::NodePublish,
        Self::ControllerExpand,
        Self::NodeExpand,
    ];

    fn word(self) -> &'static str {
        match self {
            Self::Provision => "provisioner-secret",
            Self::ControllerPublish => "controller-publish-secret",
            Self::NodeStage => "node-stage-secret",
            Self::NodePublish => "node-publish-secret",
            Self::ControllerExpand => "controller-expand-secret",
            Self::NodeExpand => "node-expand-secret",
            Self::Snapshot => "snapshotter-secret",
        }
    }
}

fn keys(word: &str) -> [String; 2] {
    [format!("{RESERVED_PREFIX}{word}-name"), format!("{RESERVED_PREFIX}{word}-namespace")]
}

/// A reserved parameter of a StorageClass that has no meaning, such as a misspelt one.
pub(crate) fn unknown_parameter(parameters: &BTreeMap<String, String>) -> Option<&str> {
    let words = Purpose::OF_VOLUMES.into_iter().map(Purpose::word).chain([DEFAULT]);
    unknown(parameters, &words.flat_map(keys).chain([FS_TYPE.to_owned()]).collect::<Vec<_>>())
}

/// Like [`unknown_parameter`], of a VolumeSnapshotClass (external-snapshotter,
/// `RemovePrefixedParameters`).
pub(crate) fn unknown_snapshot_parameter(parameters: &BTreeMap<String, String>) -> Option<&str> {
    let words = [Purpose::Snapshot.word(), "snapshotter-list-secret", "group-snapshotter-secret"];
    unknown(parameters, &words.into_iter().flat_map(keys).collect::<Vec<_>>())
}

fn unknown<'a>(parameters: &'a BTreeMap<String, String>, known: &[String]) -> Option<&'a str> {
    parameters.keys().find(|key| key.starts_with(RESERVED_PREFIX) && !known.contains(key)).map(String::as_str)
}

/// The parameters that the driver gets.
pub(crate) fn for_driver(parameters: &BTreeMap<String, String>) -> HashMap<String, String> {
    let passed = parameters.iter().filter(|(key, _)| !key.starts_with(RESERVED_PREFIX));
    passed.map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// The values of tokens such as `${pvc.name}`. A namespace may use only what a claim's user cannot
/// choose (external-provisioner, `getSecretReference`).
#[derive(Debug, Clone, Default)]
pub(crate) struct Tokens {
    pub(crate) namespace: BTreeMap<String, String>,
    pub(crate) name: BTreeMap<String, String>,
}

/// The Secret that a class's parameters name for `purpose`, if any.
pub(crate) fn reference(
    parameters: &BTreeMap<String, String>,
    purpose: Purpose,
    tokens: &Tokens,
) -> Result<Option<SecretReference>, Error> {
    let mut words = vec![purpose.word()];
    if purpose != Purpose::Snapshot {
        words.push(DEFAULT);
    }
    for word in words {
        let [name_key, namespace_key] = keys(word);
        let given = |key: &String| parameters.get(key).filter(|template| !template.is_empty());
        let (name, namespace) = match (given(&name_key), given(&namespace_key)) {
            (None, None) => continue,
            (Some(name), Some(namespace)) => (name, namespace),
            (Some(_), None) => return Err(Error::HalfNamed { found: name_key, missing: namespace_key }),
            (None, Some(_)) => return Err(Error::HalfNamed { found: namespace_key, missing: name_key }),
        };
        return Ok(Some(SecretReference {
            namespace: resolve(&namespace_key, namespace, &tokens.namespace, NAMESPACE)?,
            name: resolve(&name_key, name, &tokens.name, SECRET)?,
        }));
    }
    Ok(None)
}

/// What a resolved name is for, and its greatest length.
type NameOf = (&'static str, usize);
const NAMESPACE: NameOf = ("namespace", 63);
const SECRET: NameOf = ("secret", 253);

/// Replaces `${token}`. A dollar sign is part of no name, so every other use of it is an error.
fn resolve(
    key: &str,
    template: &str,
    tokens: &BTreeMap<String, String>,
    (of, limit): NameOf,
) -> Result<String, Error> {
    let wrong = || Error::Template { key: key.to_owned(), template: template.to_owned() };
    let (mut value, mut rest) = (String::new(), template);
    while let Some((before, after)) = rest.split_once("${") {
        let (token, after) = after.split_once('}').ok_or_else(wrong)?;
        value.push_str(before);
        value.push_str(tokens.get(token).ok_or_else(wrong)?);
        if value.len() > limit {
            break;
        }
        rest = after;
    }
    value.push_str(rest);
    let is_name = |part: &str| {
        let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        !part.is_empty() && part.bytes().all(is_inner) && !part.starts_with('-') && !part.ends_with('-')
    };
    let is_valid = match of {
        "namespace" => is_name(&value),
        _ => value.split('.').all(is_name),
    };
    if is_valid && value.len() <= limit {
        return Ok(value);
    }
    value.truncate(value.floor_char_boundary(limit));
    Err(Error::Name { key: key.to_owned(), value, of })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::{Bytes, Secret};

    fn parameters(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn tokens() -> Tokens {
        Tokens {
            namespace: parameters(&[("pvc.namespace", "shop"), ("pv.name", "pvc-1")]),
            name: parameters(&[
                ("pvc.namespace", "shop"),
                ("pv.name", "pvc-1"),
                ("pvc.name", "data"),
                ("pvc.annotations['team']", "blue"),
            ]),
        }
    }

    fn named(name: &str, namespace: &str) -> Result<Option<SecretReference>, Error> {
        let parameters = parameters(&[
            ("csi.storage.k8s.io/node-stage-secret-name", name),
            ("csi.storage.k8s.io/node-stage-secret-namespace", namespace),
        ]);
        reference(&parameters, Purpose::NodeStage, &tokens())
    }

    fn found(name: &str, namespace: &str) -> Option<SecretReference> {
        Some(SecretReference { name: name.to_owned(), namespace: namespace.to_owned() })
    }

    #[test]
    fn templates_name_the_claim_and_the_volume() {
        assert_eq!(named("plain", "vault").unwrap(), found("plain", "vault"));
        assert_eq!(named("${pvc.name}-${pv.name}", "${pvc.namespace}").unwrap(), found("data-pvc-1", "shop"));
        assert_eq!(named("of-${pvc.annotations['team']}", "vault").unwrap(), found("of-blue", "vault"));
        // The claim's user chooses the claim's name: it must not choose the namespace.
        assert!(matches!(named("x", "${pvc.name}"), Err(Error::Template { .. })));
        assert!(matches!(named("${pvc.nmae}", "vault"), Err(Error::Template { .. })));
        assert!(matches!(named("${pvc.name", "vault"), Err(Error::Template { .. })));
        for (name, namespace) in [("a/b", "vault"), ("a$b", "vault"), ("a", "v.w"), ("..", "vault")] {
            assert!(matches!(named(name, namespace), Err(Error::Name { .. })), "{name} {namespace}");
        }
        let half = parameters(&[("csi.storage.k8s.io/node-stage-secret-name", "x")]);
        let error = reference(&half, Purpose::NodeStage, &tokens()).unwrap_err().to_string();
        assert_eq!(
            error,
            "parameter csi.storage.k8s.io/node-stage-secret-name needs \
             csi.storage.k8s.io/node-stage-secret-namespace beside it"
        );
    }

    #[test]
    fn the_default_secret_is_of_calls_without_their_own() {
        let parameters = parameters(&[
            ("csi.storage.k8s.io/secret-name", "all"),
            ("csi.storage.k8s.io/secret-namespace", "vault"),
            ("csi.storage.k8s.io/node-publish-secret-name", "publish"),
            ("csi.storage.k8s.io/node-publish-secret-namespace", "vault"),
        ]);
        let of = |purpose| reference(&parameters, purpose, &tokens()).unwrap();
        assert_eq!(of(Purpose::NodePublish), found("publish", "vault"));
        assert_eq!(of(Purpose::Provision), found("all", "vault"));
        assert_eq!(of(Purpose::Snapshot), None);
    }

    #[test]
    fn reserved_parameters_are_known_and_never_passed() {
        let mut given = parameters(&[
            ("csi.storage.k8s.io/fstype", "ext4"),
            ("csi.storage.k8s.io/node-expand-secret-name", "x"),
            ("dataPath", "mirror"),
        ]);
        assert_eq!(for_driver(&given), HashMap::from([("dataPath".to_owned(), "mirror".to_owned())]));
        assert_eq!(unknown_parameter(&given), None);
        given.insert("csi.storage.k8s.io/node-stage-secrets".to_owned(), "x".to_owned());
        assert_eq!(unknown_parameter(&given), Some("csi.storage.k8s.io/node-stage-secrets"));
        let of_snapshots = parameters(&[
            ("csi.storage.k8s.io/snapshotter-secret-name", "x"),
            ("csi.storage.k8s.io/snapshotter-secrets-name", "x"),
        ]);
        let found = unknown_snapshot_parameter(&of_snapshots);
        assert_eq!(found, Some("csi.storage.k8s.io/snapshotter-secrets-name"));
    }

    #[test]
    fn secrets_are_read_as_they_are_now_and_are_never_shown() {
        let root = tempfile::tempdir().unwrap();
        let store = Store::open(root.path(), "node").unwrap();
        let reference = SecretReference { name: "key".to_owned(), namespace: "vault".to_owned() };
        let missing = Secrets::read(&store, Some(&reference)).unwrap_err().to_string();
        assert_eq!(missing, "secret \"vault/key\" of the CSI call not found: apply it");
        let mut secret: Secret = serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "key", "namespace": "vault"},
            "data": {"password": "aHVzaA=="}
        }))
        .unwrap();
        store.put_secret(secret.clone()).unwrap();
        let read = Secrets::read(&store, Some(&reference)).unwrap();
        assert_eq!(format!("{read:?}"), "Secrets(1)");
        assert_eq!(read.into_map(), HashMap::from([("password".to_owned(), "hush".to_owned())]));
        secret.data.insert("binary".to_owned(), Bytes(vec![0xff]));
        store.put_secret(secret).unwrap();
        assert!(matches!(Secrets::read(&store, Some(&reference)), Err(Error::NotText { .. })));
        assert_eq!(Secrets::read(&store, None).unwrap(), Secrets::default());
    }
}
