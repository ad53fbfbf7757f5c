//! From the text of a manifest to valid objects: YAML or JSON, any number of
//! documents.
//!
//! One bad document does not hide the good ones beside it. Every error names
//! file, line, column and field; a field that the kubelet does not know is a
//! warning or an error by the table in `fields`, never dropped in silence.

mod defaults;
mod document;
mod fields;
mod locate;
mod path;
mod validate;

use std::fmt;

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::objects::Kind;
use crate::store::AnyObject;
use document::Document;
pub use fields::{FIELD_TABLE, FieldRule, Verdict};
use path::FieldPath;

/// A file with more mistakes than this shows the first ones.
const ERRORS_SHOWN: usize = 20;

/// What a text holds.
#[derive(Debug, Default)]
pub struct Parsed {
    pub manifests: Vec<Manifest>,
    pub errors: Vec<ManifestError>,
}

/// One valid object.
#[derive(Debug)]
pub struct Manifest {
    pub object: AnyObject,
    /// Where its document begins, from 1.
    pub line: usize,
    /// Fields that do nothing here, each as a sentence with file, line and column.
    pub warnings: Vec<String>,
}

/// One mistake. Shown as `pod.yaml:7:14: spec.containers[0].image: Required value`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct ManifestError {
    pub place: Place,
    /// Which object, as far as it is known: `Pod "web"`.
    pub object: Option<String>,
    /// Begins with the field's path where a field is at fault.
    pub message: String,
}

impl fmt::Display for ManifestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.object {
            Some(object) => write!(f, "{}: {object} is invalid: {}", self.place, self.message),
            None => write!(f, "{}: {}", self.place, self.message),
        }
    }
}

/// A place in a text; line and column from 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    pub file: String,
    pub line: usize,
    pub column: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.line, self.column)
    }
}

/// Reads every document of `text`; `file` is what errors call it.
pub fn parse(text: &str, file: &str) -> Parsed {
    let mut parsed = Parsed::default();
    for document in document::split(text, file) {
        match read_document(&document) {
            Ok(manifest) => parsed.manifests.push(manifest),
            Err(errors) => parsed.errors.extend(errors),
        }
        if parsed.errors.len() >= ERRORS_SHOWN {
            parsed.errors.truncate(ERRORS_SHOWN);
            break;
        }
    }
    parsed
}

/// The two fields that decide how to read the rest.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Header {
    #[serde(default)]
    api_version: Option<String>,
    #[serde(default)]
    kind: Option<String>,
}

fn read_document(document: &Document<'_>) -> Result<Manifest, Vec<ManifestError>> {
    let header: Header = document.read().map_err(|error| vec![error])?;
    match kind_of(&header).map_err(|(field, message)| vec![document.error_at(&field, None, &message)])? {
        Kind::Pod => read_object(document, |pod| AnyObject::Pod(Box::new(pod))),
        Kind::PersistentVolume => read_object(document, |volume| AnyObject::Volume(Box::new(volume))),
        Kind::PersistentVolumeClaim => read_object(document, |claim| AnyObject::Claim(Box::new(claim))),
        Kind::StorageClass => read_object(document, |class| AnyObject::Class(Box::new(class))),
        Kind::CsiDriver => read_object(document, |driver| AnyObject::CsiDriver(Box::new(driver))),
        kind @ (Kind::Event | Kind::Node) => {
            let message = format!("{kind} is written by the kubelet, not by manifests");
            Err(vec![document.error_at(&FieldPath::root().key("kind"), None, &message)])
        }
    }
}

fn kind_of(header: &Header) -> Result<Kind, (FieldPath, String)> {
    let at = |name: &str| FieldPath::root().key(name);
    let Some(name) = header.kind.as_deref().filter(|kind| !kind.is_empty()) else {
        return Err((at("kind"), "Required value".to_owned()));
    };
    let kind: Kind = name.parse().map_err(|_| {
        let known = "Pod, PersistentVolume, PersistentVolumeClaim, StorageClass, CSIDriver";
        (at("kind"), format!("Unsupported value: {name:?}: supported values: {known}"))
    })?;
    let want = kind.api_version();
    match header.api_version.as_deref() {
        Some(version) if version == want => Ok(kind),
        Some(version) if !version.is_empty() => {
            let message = format!("Unsupported value: {version:?}: {kind} is of apiVersion {want}");
            Err((at("apiVersion"), message))
        }
        _ => Err((at("apiVersion"), format!("Required value: {want}"))),
    }
}

fn read_object<T: DeserializeOwned>(
    document: &Document<'_>,
    wrap: fn(T) -> AnyObject,
) -> Result<Manifest, Vec<ManifestError>> {
    let (object, unknown) = document.read_noting_unknown::<T>().map_err(|error| vec![error])?;
    let mut object = wrap(object);
    defaults::fill(&mut object);
    let title = format!("{} {:?}", object.kind(), object.metadata().name);
    let mut warnings = Vec::new();
    let mut errors = Vec::new();
    for field in unknown {
        match fields::judge(object.kind(), &field, document) {
            Verdict::Harmless => {}
            Verdict::Ignored(effect) => {
                warnings.push(format!("{}: {field} is not supported: {effect}", document.place(&field)));
            }
            Verdict::Refused(reason) => {
                let message = format!("not supported: {reason}");
                errors.push(document.error_at(&field, Some(&title), &message));
            }
        }
    }
    if errors.is_empty() {
        let invalid = validate::object(&object);
        errors.extend(invalid.iter().map(|bad| document.error_at(&bad.field, Some(&title), &bad.message)));
    }
    if errors.is_empty() { Ok(Manifest { object, line: document.line(), warnings }) } else { Err(errors) }
}
