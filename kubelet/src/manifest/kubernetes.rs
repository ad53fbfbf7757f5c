//! Whether the Kubernetes API has a field, as the types of `k8s-openapi` know it.
//!
//! A type is read from a document that holds the field's path and nothing else, and the
//! reading stops at the field. So the values of the manifest do not matter: a value of the
//! wrong type changes no answer.

use std::fmt;
use std::iter;

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::storage::v1 as storage;
use serde::Deserializer;
use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{self, DeserializeOwned, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;

use super::path::{FieldPath, Segment};
use crate::objects::Kind;

/// The version whose fields `k8s-openapi` has: its feature in the workspace's Cargo.toml.
pub(super) const VERSION: &str = "1.36";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lookup {
    /// Kubernetes has the field, or the types do not say.
    Known,
    /// `similar` is the field beside it whose name differs in upper and lower case alone.
    Unknown { similar: Option<&'static str> },
}

pub(super) fn look_up(kind: Kind, field: &FieldPath) -> Lookup {
    let path = field.segments();
    match kind {
        Kind::Pod => look_up_in::<core::Pod>(path),
        Kind::PersistentVolume => look_up_in::<core::PersistentVolume>(path),
        Kind::PersistentVolumeClaim => look_up_in::<core::PersistentVolumeClaim>(path),
        Kind::StorageClass => look_up_in::<storage::StorageClass>(path),
        Kind::CsiDriver => look_up_in::<storage::CSIDriver>(path),
        // Custom resources: `k8s-openapi` knows their metadata only, and `objects` has all other fields.
        Kind::VolumeSnapshot | Kind::VolumeSnapshotClass | Kind::VolumeSnapshotContent => match path {
            [Segment::Key(first), ..] if first == "metadata" => look_up_in::<core::Secret>(path),
            [Segment::Key(_), Segment::Key(second), rest @ ..] if second == "volumeSnapshotRef" => {
                look_up_in::<core::ObjectReference>(rest)
            }
            // It has no effect, so the table has it too.
            [_, Segment::Key(second)] if second == "sourceVolumeMode" => Lookup::Known,
            _ => Lookup::Unknown { similar: None },
        },
        Kind::ConfigMap => look_up_in::<core::ConfigMap>(path),
        Kind::Secret => look_up_in::<core::Secret>(path),
        // No manifest has these kinds.
        Kind::Event | Kind::Node => Lookup::Known,
    }
}

fn look_up_in<T: DeserializeOwned>(path: &[Segment]) -> Lookup {
    match T::deserialize(Probe { rest: path, name: "", siblings: &[] }) {
        Err(Stop::Unknown { similar }) => Lookup::Unknown { similar },
        Err(Stop::Known | Stop::Undecided) | Ok(_) => Lookup::Known,
    }
}

/// Why the reading ended.
#[derive(Debug)]
enum Stop {
    Known,
    Unknown {
        similar: Option<&'static str>,
    },
    /// The type refused a value on the way to the field.
    Undecided,
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

impl std::error::Error for Stop {}

impl de::Error for Stop {
    fn custom<T: fmt::Display>(_: T) -> Self {
        Self::Undecided
    }
}

/// A document with one field, at the end of `rest`.
#[derive(Clone, Copy)]
struct Probe<'p> {
    rest: &'p [Segment],
    /// The last key on the way here.
    name: &'p str,
    /// Every field of the struct that has `name`, if it is a struct.
    siblings: &'static [&'static str],
}

impl<'p> Probe<'p> {
    fn enter<'de, V: Visitor<'de>>(
        self,
        siblings: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Stop> {
        let Some((segment, rest)) = self.rest.split_first() else { return Err(Stop::Known) };
        match segment {
            Segment::Key(name) => {
                let field = (name.as_str(), Probe { rest, name, siblings });
                visitor.visit_map(MapDeserializer::new(iter::once(field)))
            }
            Segment::Index(_) => visitor.visit_seq(SeqDeserializer::new(iter::once(Probe { rest, ..self }))),
        }
    }

    fn similar(self) -> Option<&'static str> {
        self.siblings.iter().copied().find(|field| field.eq_ignore_ascii_case(self.name))
    }
}

impl<'de> Deserializer<'de> for Probe<'_> {
    type Error = Stop;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Stop> {
        self.enter(&[], visitor)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Stop> {
        self.enter(fields, visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Stop> {
        if self.rest.is_empty() { Err(Stop::Known) } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Stop> {
        if self.rest.is_empty() { Err(Stop::Known) } else { visitor.visit_newtype_struct(self) }
    }

    /// What a type asks to skip is a field that it does not have.
    fn deserialize_ignored_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, Stop> {
        if self.rest.is_empty() {
            Err(Stop::Unknown { similar: self.similar() })
        } else {
            Err(Stop::Undecided)
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map enum identifier
    }
}

impl IntoDeserializer<'_, Stop> for Probe<'_> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::super::fields::FIELD_TABLE;
    use super::*;

    /// `status.conditions[0].type`, as a path.
    fn path(text: &str) -> FieldPath {
        text.split('.').fold(FieldPath::root(), |path, part| match part.split_once('[') {
            Some((name, _)) => path.key(name).index(0),
            None => path.key(part),
        })
    }

    fn is_known(kind: Kind, field: &str) -> bool {
        look_up(kind, &path(field)) == Lookup::Known
    }

    #[test]
    fn fields_of_kubernetes_are_known_and_misspelt_ones_are_not() {
        use Kind::{CsiDriver, PersistentVolume, PersistentVolumeClaim, Pod, StorageClass};
        for (kind, known, misspelt) in [
            (Pod, "spec.hostnameOverride", "spec.hostnameOveride"),
            (Pod, "spec.containers[0].ports[0].hostPort", "spec.containers[0].ports[0].hostPrt"),
            (Pod, "spec.containers[0].securityContext.runAsUser", "spec.containers[0].securityContext.runAs"),
            (Pod, "metadata.ownerReferences[0].uid", "metadata.ownerReferences[0].uuid"),
            (Pod, "spec.containers", "containers"),
            (PersistentVolumeClaim, "spec.dataSource.apiGroup", "spec.dataSource.apiGrp"),
            (PersistentVolumeClaim, "status.conditions[0].message", "status.conditions[0].mesage"),
            (PersistentVolumeClaim, "spec.resources.requests", "spec.resources.request"),
            (PersistentVolume, "spec.nfs", "spec.nsf"),
            (StorageClass, "allowedTopologies[0].matchLabelExpressions[0].key", "allowedTopologies[0].key"),
            (CsiDriver, "spec.tokenRequests[0].audience", "spec.tokenRequests[0].audiences"),
        ] {
            assert!(is_known(kind, known), "{kind} {known}");
            assert!(!is_known(kind, misspelt), "{kind} {misspelt}");
        }
    }

    #[test]
    fn keys_of_maps_are_free() {
        assert!(is_known(Kind::Pod, "metadata.labels.app"));
        assert!(is_known(Kind::PersistentVolumeClaim, "spec.resources.requests.anything"));
    }

    #[test]
    fn a_name_in_another_case_is_suggested() {
        let similar = |field| look_up(Kind::Pod, &path(field));
        assert_eq!(
            similar("spec.containers[0].ports[0].hostIp"),
            Lookup::Unknown { similar: Some("hostIP") }
        );
        assert_eq!(similar("spec.dnsPolcy"), Lookup::Unknown { similar: None });
    }

    #[test]
    fn a_path_that_the_types_cannot_follow_stays_known() {
        assert!(is_known(Kind::Pod, "spec[0].containers"));
        assert!(is_known(Kind::Pod, "spec.nowhere.field"));
    }

    #[test]
    fn every_row_of_the_field_table_is_a_field_of_kubernetes() {
        for rule in FIELD_TABLE {
            let kind = rule.kind.unwrap_or(Kind::Pod);
            assert!(is_known(kind, rule.field), "{kind} {}", rule.field);
        }
    }

    #[test]
    fn the_version_is_that_of_the_dependency() {
        let feature = format!("features = [\"v{}\"]", VERSION.replace('.', "_"));
        let manifest = include_str!("../../../Cargo.toml");
        let dependency = manifest.lines().find(|line| line.starts_with("k8s-openapi")).unwrap();
        assert!(dependency.contains(&feature), "{dependency}");
    }
}
