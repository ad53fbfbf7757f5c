//! The JSON documents of an image: index, manifest and configuration, with the fields that an
//! import uses.
//!
//! Invariant: a parsed document takes a small multiple of its bytes. The parser skips other fields,
//! and every list has a limit.

use std::fmt;
use std::marker::PhantomData;

use oci_spec::image::Arch;
use serde::de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::ImageConfig;
use super::error::ImageError;

const MAX_MANIFESTS: usize = 10_000;
/// The most layers that overlayfs stacks (OVL_MAX_STACK).
const MAX_LAYERS: usize = 500;
/// Limit of Env, of Entrypoint and of Cmd.
const MAX_WORDS: usize = 10_000;
const MAX_VOLUMES: usize = 1000;
/// Limit of a digest, a media type or a signal.
const MAX_NAME_BYTES: usize = 255;
/// Limit of User, of WorkingDir and of a volume (PATH_MAX).
const MAX_PATH_BYTES: usize = 4096;

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const DOCKER_LIST: &str = "application/vnd.docker.distribution.manifest.list.v2+json";
const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const DOCKER_MANIFEST: &str = "application/vnd.docker.distribution.manifest.v2+json";
/// What a registry is asked for, as the value of `Accept`.
pub(crate) const MANIFEST_TYPES: &str = "application/vnd.oci.image.index.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, \
    application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.v2+json";

#[derive(Debug, Deserialize)]
pub(crate) struct Index {
    #[serde(deserialize_with = "manifests")]
    pub(crate) manifests: Vec<Descriptor>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Manifest {
    pub(crate) config: Descriptor,
    #[serde(deserialize_with = "layers")]
    pub(crate) layers: Vec<Descriptor>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    #[serde(deserialize_with = "media_type")]
    media_type: String,
    /// Not validated here: `Source` checks the form when it opens the blob.
    #[serde(deserialize_with = "digest")]
    pub(crate) digest: String,
    pub(crate) size: u64,
    pub(crate) platform: Option<Platform>,
    annotations: Option<Annotations>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Platform {
    pub(crate) architecture: String,
    pub(crate) os: String,
}

#[derive(Debug, Deserialize)]
struct Annotations {
    #[serde(rename = "io.containerd.image.name")]
    containerd: Option<String>,
    #[serde(rename = "org.opencontainers.image.ref.name")]
    oci: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Configuration {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) config: Process,
    pub(crate) rootfs: RootFs,
}

#[derive(Debug, Deserialize)]
pub(crate) struct RootFs {
    #[serde(deserialize_with = "diff_ids")]
    pub(crate) diff_ids: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(crate) struct Process {
    #[serde(deserialize_with = "entrypoint")]
    entrypoint: Vec<String>,
    #[serde(deserialize_with = "cmd")]
    cmd: Vec<String>,
    #[serde(deserialize_with = "env")]
    env: Vec<String>,
    #[serde(deserialize_with = "working_dir")]
    working_dir: String,
    #[serde(deserialize_with = "user")]
    user: String,
    #[serde(deserialize_with = "stop_signal")]
    stop_signal: String,
    #[serde(deserialize_with = "volumes")]
    volumes: Vec<String>,
}

/// What a document of a registry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Index,
    Manifest,
}

/// The fields that tell documents apart.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Shape {
    media_type: Option<String>,
    manifests: Option<IgnoredAny>,
    config: Option<IgnoredAny>,
    layers: Option<IgnoredAny>,
}

impl Shape {
    /// The document's own media type decides, since its digest covers it, then the answer's. `Err` has
    /// the media type that does not fit: a document that could be both is refused (CVE-2021-41190).
    pub(crate) fn kind(&self, of_answer: Option<&str>) -> Result<Kind, String> {
        let media_type = self.media_type.as_deref().or(of_answer).unwrap_or_default();
        let has_content = self.config.is_some() || self.layers.is_some();
        match media_type {
            INDEX | DOCKER_LIST if !has_content => Ok(Kind::Index),
            OCI_MANIFEST | DOCKER_MANIFEST if self.manifests.is_none() => Ok(Kind::Manifest),
            other => Err(other.chars().take(MAX_NAME_BYTES).collect()),
        }
    }
}

impl Index {
    /// The manifest for this node's platform.
    pub(crate) fn of_this_node(&self, digest: &str) -> super::error::Result<&Descriptor> {
        let architecture = Arch::default().to_string();
        let suits = |d: &&Descriptor| {
            d.platform.as_ref().is_none_or(|p| p.os == "linux" && p.architecture == architecture)
        };
        let found = self.manifests.iter().find(suits);
        found.ok_or_else(|| ImageError::NoPlatform { digest: digest.to_owned(), architecture })
    }
}

impl Descriptor {
    pub(crate) fn is_index(&self) -> bool {
        matches!(self.media_type.as_str(), INDEX | DOCKER_LIST)
    }

    /// The image's names in an index; containerd's annotation comes first.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        let names = self.annotations.as_ref().map(|a| [&a.containerd, &a.oci]);
        names.into_iter().flatten().filter_map(Option::as_deref)
    }
}

impl From<Process> for ImageConfig {
    fn from(process: Process) -> Self {
        let Process { entrypoint, cmd, env, working_dir, user, stop_signal, volumes } = process;
        Self { entrypoint, cmd, env, working_dir, user, stop_signal, volumes }
    }
}

fn manifests<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Descriptor>, D::Error> {
    list(from, "manifests", MAX_MANIFESTS)
}

fn layers<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Descriptor>, D::Error> {
    list(from, "layers", MAX_LAYERS)
}

fn diff_ids<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    list(from, "diff_ids", MAX_LAYERS)
}

fn entrypoint<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    list(from, "Entrypoint", MAX_WORDS)
}

fn cmd<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    list(from, "Cmd", MAX_WORDS)
}

fn env<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    list(from, "Env", MAX_WORDS)
}

fn media_type<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    text(String::deserialize(from)?, "mediaType", MAX_NAME_BYTES)
}

fn digest<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    text(String::deserialize(from)?, "digest", MAX_NAME_BYTES)
}

fn working_dir<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    let dir = text(or_default(from)?, "WorkingDir", MAX_PATH_BYTES)?;
    if dir.contains('\0') {
        return Err(D::Error::custom("WorkingDir has a NUL byte"));
    }
    Ok(dir)
}

fn user<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    text(or_default(from)?, "User", MAX_PATH_BYTES)
}

fn stop_signal<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    text(or_default(from)?, "StopSignal", MAX_NAME_BYTES)
}

/// The keys of an object whose values have no meaning.
fn volumes<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    from.deserialize_any(Volumes)
}

/// Treats `null` like an absent field.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

fn text<E: Error>(text: String, field: &str, most: usize) -> Result<String, E> {
    if text.len() > most {
        return Err(E::custom(format_args!("{field} has more than {most} bytes")));
    }
    Ok(text)
}

fn list<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    from: D,
    field: &'static str,
    most: usize,
) -> Result<Vec<T>, D::Error> {
    from.deserialize_any(List { field, most, of: PhantomData })
}

/// Stops at the first element beyond the limit.
struct List<T> {
    field: &'static str,
    most: usize,
    of: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for List<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, a list", self.field)
    }

    /// Go encodes an empty list as `null`.
    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(Vec::new())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Self::Value, A::Error> {
        let mut list = Vec::new();
        while let Some(element) = elements.next_element()? {
            if list.len() == self.most {
                let (field, most) = (self.field, self.most);
                return Err(A::Error::custom(format_args!("{field} has more than {most} elements")));
            }
            list.push(element);
        }
        Ok(list)
    }
}

struct Volumes;

impl<'de> Visitor<'de> for Volumes {
    type Value = Vec<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Volumes, an object")
    }

    /// Go encodes an empty map as `null`.
    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(Vec::new())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
        let mut volumes = Vec::new();
        while let Some((path, IgnoredAny)) = entries.next_entry::<String, IgnoredAny>()? {
            if volumes.len() == MAX_VOLUMES {
                return Err(A::Error::custom(format_args!("Volumes has more than {MAX_VOLUMES} elements")));
            }
            if path.contains('\0') {
                return Err(A::Error::custom("Volumes has a NUL byte"));
            }
            volumes.push(text(path, "Volumes", MAX_PATH_BYTES)?);
        }
        Ok(volumes)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn problem<T: serde::de::DeserializeOwned + fmt::Debug>(document: &Value) -> String {
        let error = serde_json::from_str::<T>(&document.to_string()).unwrap_err().to_string();
        error.split_once(" at line ").unwrap().0.to_owned()
    }

    fn configuration(process: &Value) -> Value {
        json!({"config": process, "rootfs": {"type": "layers", "diff_ids": ["sha256:1"]}})
    }

    #[test]
    fn every_list_of_a_document_has_a_limit_that_the_error_names() {
        let descriptor = json!({"mediaType": "m", "digest": "d", "size": 1});
        let index = json!({"manifests": vec![&descriptor; 10_001]});
        assert_eq!(problem::<Index>(&index), "manifests has more than 10000 elements");
        let manifest = json!({"config": descriptor, "layers": vec![&descriptor; 501]});
        assert_eq!(problem::<Manifest>(&manifest), "layers has more than 500 elements");
        let diff_ids = json!({"rootfs": {"diff_ids": vec!["d"; 501]}});
        assert_eq!(problem::<Configuration>(&diff_ids), "diff_ids has more than 500 elements");
        for field in ["Entrypoint", "Cmd", "Env"] {
            let many = configuration(&json!({field: vec!["w"; 10_001]}));
            assert_eq!(problem::<Configuration>(&many), format!("{field} has more than 10000 elements"));
            let most = configuration(&json!({field: vec!["w"; 10_000]}));
            serde_json::from_value::<Configuration>(most).unwrap();
        }
    }

    #[test]
    fn volumes_are_the_keys_of_an_object_with_limits() {
        let volumes = |paths: &[String]| -> Value {
            let entries = paths.iter().map(|path| (path.clone(), json!({})));
            configuration(&json!({"Volumes": Value::Object(entries.collect())}))
        };
        let found: Configuration = serde_json::from_value(volumes(&["/a".into(), "/b/c".into()])).unwrap();
        assert_eq!(found.config.volumes, ["/a", "/b/c"]);
        let many: Vec<String> = (0..1001).map(|n| format!("/{n}")).collect();
        serde_json::from_value::<Configuration>(volumes(&many[1..])).unwrap();
        for (paths, expected) in [
            (many, "Volumes has more than 1000 elements"),
            (vec!["x".repeat(4097)], "Volumes has more than 4096 bytes"),
            (vec!["/a\0b".to_owned()], "Volumes has a NUL byte"),
        ] {
            assert_eq!(problem::<Configuration>(&volumes(&paths)), expected);
        }
    }

    #[test]
    fn every_text_that_is_kept_has_a_limit_that_the_error_names() {
        for (field, most) in [("User", 4096), ("WorkingDir", 4096), ("StopSignal", 255)] {
            let long = configuration(&json!({field: "x".repeat(most + 1)}));
            assert_eq!(problem::<Configuration>(&long), format!("{field} has more than {most} bytes"));
        }
        for field in ["mediaType", "digest"] {
            let mut descriptor = json!({"mediaType": "m", "digest": "d", "size": 1});
            descriptor[field] = json!("x".repeat(256));
            let index = json!({"manifests": [descriptor]});
            assert_eq!(problem::<Index>(&index), format!("{field} has more than 255 bytes"));
        }
    }

    #[test]
    fn a_document_of_a_registry_is_an_index_or_a_manifest_and_never_both() {
        let kind = |document: Value, of_answer: Option<&str>| {
            serde_json::from_value::<Shape>(document).unwrap().kind(of_answer)
        };
        assert_eq!(kind(json!({"mediaType": INDEX, "manifests": []}), Some(OCI_MANIFEST)), Ok(Kind::Index));
        assert_eq!(kind(json!({"config": {}, "layers": []}), Some(DOCKER_MANIFEST)), Ok(Kind::Manifest));
        let both = json!({"manifests": [], "config": {}, "layers": []});
        assert_eq!(kind(both.clone(), Some(INDEX)), Err(INDEX.to_owned()));
        assert_eq!(kind(both, Some(OCI_MANIFEST)), Err(OCI_MANIFEST.to_owned()));
        assert_eq!(kind(json!({"schemaVersion": 1}), Some("text/html")), Err("text/html".to_owned()));
    }

    #[test]
    fn a_working_directory_with_a_nul_byte_is_refused() {
        let document = configuration(&json!({"WorkingDir": "/a\0b"}));
        assert_eq!(problem::<Configuration>(&document), "WorkingDir has a NUL byte");
    }

    #[test]
    fn what_is_absent_or_null_is_empty_and_the_rest_is_skipped() {
        for process in [json!(null), json!({"Env": null, "User": null, "Volumes": null, "Labels": {"a": 1}})]
        {
            let mut document = configuration(&process);
            document["history"] = json!([{}, {"created": []}]);
            let found: Configuration = serde_json::from_value(document).unwrap();
            assert_eq!(found.rootfs.diff_ids, ["sha256:1"]);
            assert_eq!(format!("{:?}", found.config), format!("{:?}", Process::default()));
        }
        let error = serde_json::from_str::<Configuration>("{}").unwrap_err().to_string();
        assert!(error.starts_with("missing field `rootfs`"), "{error}");
    }
}
