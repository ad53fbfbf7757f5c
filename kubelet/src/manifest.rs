//! From the text of a manifest to valid objects: YAML or JSON, any number of
//! documents.
//!
//! One bad document does not hide the good ones beside it. Every error names
//! file, line, column and field. A field that the kubelet does not know is a warning
//! or an error by the table in `fields`, never dropped in silence; a field that
//! Kubernetes does not know either is an error.
//! What a file may ask of the kubelet is bounded by `limits`.

mod defaults;
mod document;
mod fields;
mod json;
mod kubernetes;
mod limits;
mod list;
mod path;
mod read;
mod scalar;
mod tree;
mod validate;
mod workloads;

use std::fmt;

use serde::de::DeserializeOwned;

use crate::objects::{DEFAULT_NAMESPACE, Document, Kind};
use crate::store::{AnyObject, Described};
use fields::Judgement;
pub use fields::{FIELD_TABLE, FieldRule, Verdict};
use limits::{DOCUMENTS, Deadline};
pub use limits::{FILE_BYTES, TIME};
use path::FieldPath;
use read::Unknown;
use tree::Value;
pub use workloads::instead_of_workload;

/// A file with more mistakes than this shows the first ones, and so does an
/// object with its warnings.
const SHOWN: usize = 20;

/// What a text holds.
#[derive(Debug, Default)]
pub struct Parsed {
    pub manifests: Vec<Manifest>,
    pub errors: Vec<ManifestError>,
    /// The time was over before the end of the text: on another day it may be read.
    pub out_of_time: bool,
}

/// One valid object.
#[derive(Debug)]
pub struct Manifest {
    pub object: AnyObject,
    /// Every field, also those that the object does not have.
    pub document: Document,
    /// Where its document begins, from 1.
    pub line: usize,
    /// Fields that do nothing here, each as a sentence with file, line and column.
    pub warnings: Vec<String>,
}

impl Manifest {
    pub fn described(&self) -> Described {
        Described { object: self.object.clone(), document: self.document.clone() }
    }
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

/// What becomes of a field that Kubernetes does not have, as `apply --validate` says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum UnknownFields {
    #[default]
    Refuse,
    Warn,
    Ignore,
}

/// How a client's documents are read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reading {
    pub unknown_fields: UnknownFields,
    /// Of objects without one; an object with another one is an error.
    pub namespace: Option<String>,
}

/// Reads every document of `bytes`; `file` is what errors call it. Takes `TIME`
/// at most, and refuses the whole file where that is too short.
pub fn parse(bytes: &[u8], file: &str) -> Parsed {
    parse_with(bytes, file, &Reading::default())
}

/// Like [`parse`], as a client asks for it.
pub fn parse_with(bytes: &[u8], file: &str, reading: &Reading) -> Parsed {
    let deadline = Deadline::start();
    let text = match text_of(bytes, file) {
        Ok(text) => text,
        Err(error) => return Parsed { errors: vec![error], ..Parsed::default() },
    };
    let sections = document::split(text, DOCUMENTS + 1);
    if let Some(section) = sections.get(DOCUMENTS) {
        let message = format!("more than {DOCUMENTS} documents in this file: at most {DOCUMENTS} are read");
        return Parsed { errors: vec![whole_file(file, section.line(), message)], ..Parsed::default() };
    }
    let mut parsed = Parsed::default();
    for section in &sections {
        let document = document::Document::read(section, file, deadline);
        match document.and_then(list::parts) {
            Ok(parts) => {
                for part in parts.iter().take_while(|_| !deadline.has_passed()) {
                    match read_document(part, reading) {
                        Ok(manifest) => parsed.manifests.push(manifest),
                        Err(errors) => parsed.errors.extend(errors),
                    }
                }
            }
            Err(error) => parsed.errors.push(error),
        }
        if deadline.has_passed() {
            let seconds = TIME.as_secs();
            let message = format!("reading this file takes longer than {seconds} s, the limit: split it");
            let errors = vec![whole_file(file, section.line(), message)];
            return Parsed { errors, out_of_time: true, ..Parsed::default() };
        }
    }
    parsed.errors.truncate(SHOWN);
    parsed
}

/// A NUL ends the text for some parsers, so that what follows would be dropped in silence.
fn text_of<'a>(bytes: &'a [u8], file: &str) -> Result<&'a str, ManifestError> {
    if let Some(error) = too_large(bytes.len(), file) {
        return Err(error);
    }
    let error_at = |offset: usize, message: &str| {
        let before = &bytes[..offset];
        let line = before.iter().filter(|byte| **byte == b'\n').count() + 1;
        let line_start = before.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let column = String::from_utf8_lossy(&before[line_start..]).chars().count() + 1;
        let place = Place { file: file.to_owned(), line, column };
        ManifestError { place, object: None, message: message.to_owned() }
    };
    let text = std::str::from_utf8(bytes)
        .map_err(|error| error_at(error.valid_up_to(), "a byte that is not UTF-8"))?;
    match text.find('\0') {
        Some(offset) => Err(error_at(offset, "a NUL byte: a manifest is text")),
        None => Ok(text),
    }
}

/// The error for a file of so many bytes, if it has too many.
pub fn too_large(bytes: usize, file: &str) -> Option<ManifestError> {
    let message = format!("the file has {bytes} bytes: at most {FILE_BYTES} (10 MiB) are read");
    (bytes > FILE_BYTES).then(|| whole_file(file, 1, message))
}

fn whole_file(file: &str, line: usize, message: String) -> ManifestError {
    ManifestError { place: Place { file: file.to_owned(), line, column: 1 }, object: None, message }
}

fn read_document(
    document: &document::Document<'_>,
    reading: &Reading,
) -> Result<Manifest, Vec<ManifestError>> {
    match kind_of(document).map_err(|(field, message)| vec![document.error_at(&field, None, &message)])? {
        Kind::Pod => read_object(document, reading, |pod| AnyObject::Pod(Box::new(pod))),
        Kind::PersistentVolume => {
            read_object(document, reading, |volume| AnyObject::Volume(Box::new(volume)))
        }
        Kind::PersistentVolumeClaim => {
            read_object(document, reading, |claim| AnyObject::Claim(Box::new(claim)))
        }
        Kind::StorageClass => read_object(document, reading, |class| AnyObject::Class(Box::new(class))),
        Kind::CsiDriver => read_object(document, reading, |driver| AnyObject::CsiDriver(Box::new(driver))),
        Kind::VolumeSnapshot => {
            read_object(document, reading, |snapshot| AnyObject::Snapshot(Box::new(snapshot)))
        }
        Kind::VolumeSnapshotClass => {
            read_object(document, reading, |class| AnyObject::SnapshotClass(Box::new(class)))
        }
        Kind::VolumeSnapshotContent => {
            read_object(document, reading, |content| AnyObject::SnapshotContent(Box::new(content)))
        }
        Kind::ConfigMap => read_object(document, reading, |map| AnyObject::ConfigMap(Box::new(map))),
        Kind::Secret => read_object(document, reading, |secret| AnyObject::Secret(Box::new(secret))),
        kind @ (Kind::Event | Kind::Node) => {
            let message = format!("{kind} is written by the kubelet, not by manifests");
            Err(vec![document.error_at(&FieldPath::root().key("kind"), None, &message)])
        }
    }
}

/// The two fields that decide how to read the rest.
fn kind_of(document: &document::Document<'_>) -> Result<Kind, (FieldPath, String)> {
    let at = |name: &str| FieldPath::root().key(name);
    if !matches!(document.root().value, Value::Mapping(_)) {
        let message = "Invalid value: a manifest is a mapping of fields".to_owned();
        return Err((at("kind"), message));
    }
    let Some(name) = document.text(&at("kind")).filter(|kind| !kind.is_empty()) else {
        return Err((at("kind"), "Required value".to_owned()));
    };
    let kind: Kind = name.parse().map_err(|_| {
        if let Some(instead) = instead_of_workload(name) {
            return (at("kind"), format!("Unsupported value: {name:?}: {instead}"));
        }
        let known = "Pod, PersistentVolume, PersistentVolumeClaim, StorageClass, CSIDriver, VolumeSnapshot, \
             VolumeSnapshotClass, VolumeSnapshotContent, ConfigMap, Secret";
        (at("kind"), format!("Unsupported value: {name:?}: supported values: {known}"))
    })?;
    let want = kind.api_version();
    match document.text(&at("apiVersion")) {
        Some(version) if version == want => Ok(kind),
        Some(version) if !version.is_empty() => {
            let message = format!("Unsupported value: {version:?}: {kind} is of apiVersion {want}");
            Err((at("apiVersion"), message))
        }
        _ => Err((at("apiVersion"), format!("Required value: {want}"))),
    }
}

fn read_object<T: DeserializeOwned>(
    document: &document::Document<'_>,
    reading: &Reading,
    wrap: fn(T) -> AnyObject,
) -> Result<Manifest, Vec<ManifestError>> {
    let (object, unknown) = document.object::<T>().map_err(|error| vec![error])?;
    let mut object = wrap(object);
    defaults::fill(&mut object, reading.namespace.as_deref().unwrap_or(DEFAULT_NAMESPACE));
    let (warnings, mut errors) = judge_unknown(document, object.kind(), &unknown, reading.unknown_fields);
    errors.extend(refuse_other_namespace(document, &object.reference().namespace, reading));
    if errors.is_empty() {
        let title = document.title();
        let invalid = validate::object(&object);
        let shown = invalid.iter().take(SHOWN);
        errors.extend(shown.map(|bad| document.error_at(&bad.field, Some(&title), &bad.message)));
    }
    if !errors.is_empty() {
        return Err(errors);
    }
    let whole = Document::new(&json::value(document.root()));
    Ok(Manifest { object, document: whole, line: document.line(), warnings })
}

/// The warnings and the errors about the fields that the object's type does not have.
fn judge_unknown(
    document: &document::Document<'_>,
    kind: Kind,
    unknown: &[Unknown<'_>],
    unknown_fields: UnknownFields,
) -> (Vec<String>, Vec<ManifestError>) {
    let title = document.title();
    let (mut warnings, mut errors) = (Vec::new(), Vec::new());
    let mut not_shown = 0;
    for unknown in unknown {
        let field = &unknown.path;
        let place = || document.at(unknown.node.at);
        match fields::judge(kind, unknown) {
            Judgement::Harmless => {}
            Judgement::Misspelt(_) if unknown_fields == UnknownFields::Ignore => {}
            Judgement::Misspelt(message) if unknown_fields == UnknownFields::Refuse => {
                if errors.len() < SHOWN {
                    errors.push(document.error_at(field, Some(&title), &message));
                }
            }
            Judgement::Ignored(_) | Judgement::Misspelt(_) if warnings.len() == SHOWN => not_shown += 1,
            Judgement::Misspelt(message) => {
                warnings.push(document::clipped(format!("{}: {field}: {message}", place())));
            }
            Judgement::Ignored(effect) => {
                warnings.push(document::clipped(format!("{}: {field} is not supported: {effect}", place())));
            }
            Judgement::Refused(_) if errors.len() == SHOWN => {}
            Judgement::Refused(message) => errors.push(document.error_at(field, Some(&title), &message)),
        }
    }
    if not_shown > 0 {
        warnings.push(format!("{title}: {not_shown} more fields are not supported"));
    }
    (warnings, errors)
}

fn refuse_other_namespace(
    document: &document::Document<'_>,
    namespace: &str,
    reading: &Reading,
) -> Option<ManifestError> {
    let asked = reading.namespace.as_ref().filter(|asked| !namespace.is_empty() && *asked != namespace)?;
    let message = format!(
        "the namespace from the provided object {namespace:?} does not match the namespace {asked:?}. You must \
         pass '--namespace={namespace}' to perform this operation."
    );
    let field = FieldPath::root().key("metadata").key("namespace");
    Some(document.error_at(&field, Some(&document.title()), &message))
}
