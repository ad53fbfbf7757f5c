//! The JSON schemas of the kinds, as `k8s-openapi` has them; those of snapshots are in `snapshots.rs`.

use k8s_openapi::api::core::v1 as core;
use k8s_openapi::api::storage::v1 as storage;
use kubelet::objects::Kind;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Value, json};

use crate::snapshots;

/// The schema of one kind, with the definitions that it refers to.
pub(crate) struct Schema(Value);

pub(crate) fn all() -> Vec<(Kind, Schema)> {
    vec![
        (Kind::Pod, Schema::of::<core::Pod>()),
        (Kind::PersistentVolumeClaim, Schema::of::<core::PersistentVolumeClaim>()),
        (Kind::PersistentVolume, Schema::of::<core::PersistentVolume>()),
        (Kind::StorageClass, Schema::of::<storage::StorageClass>()),
        (Kind::CsiDriver, Schema::of::<storage::CSIDriver>()),
        (Kind::ConfigMap, Schema::of::<core::ConfigMap>()),
        (Kind::Secret, Schema::of::<core::Secret>()),
        (Kind::VolumeSnapshot, snapshots::snapshot()),
        (Kind::VolumeSnapshotClass, snapshots::class()),
        (Kind::VolumeSnapshotContent, snapshots::content()),
    ]
}

impl Schema {
    pub(crate) fn new(root: Value) -> Self {
        Self(root)
    }

    pub(crate) fn of<T: JsonSchema>() -> Self {
        Self(SchemaGenerator::default().into_root_schema_for::<T>().to_value())
    }

    pub(crate) fn root(&self) -> &Value {
        &self.0
    }

    /// The schema that a reference stands for.
    pub(crate) fn resolved<'a>(&'a self, mut schema: &'a Value) -> &'a Value {
        while let Some(reference) = schema["$ref"].as_str() {
            let pointer = reference.trim_start_matches('#');
            schema = self.0.pointer(pointer).unwrap_or_else(|| panic!("no definition {reference}"));
        }
        schema
    }

    /// Names and schemas of an object's fields; none for a scalar and for a map.
    pub(crate) fn fields<'a>(&'a self, schema: &'a Value) -> Vec<(&'a str, &'a Value)> {
        let fields = self.resolved(schema)["properties"].as_object();
        fields.into_iter().flatten().map(|(name, field)| (name.as_str(), field)).collect()
    }

    /// The schema of a list's items.
    pub(crate) fn items<'a>(&'a self, schema: &'a Value) -> Option<&'a Value> {
        self.resolved(schema).get("items")
    }

    /// A value that asks for something, with everything that it must have.
    pub(crate) fn sample(&self, schema: &Value) -> Value {
        let schema = self.resolved(schema);
        let fields = self.fields(schema);
        match schema["type"].as_str() {
            Some("boolean") => json!(true),
            Some("integer" | "number") => json!(1),
            Some("array") => json!([self.sample(&schema["items"])]),
            Some("object") if fields.is_empty() => match schema.get("additionalProperties") {
                Some(values) if values.is_object() => json!({"x": self.sample(values)}),
                _ => json!({"x": "x"}),
            },
            Some("object") => {
                let is_required =
                    |name: &str| schema["required"].as_array().is_some_and(|all| all.contains(&json!(name)));
                let mut wanted: Vec<_> = fields.iter().filter(|(name, _)| is_required(name)).collect();
                if wanted.is_empty() {
                    let is_plain =
                        |field: &Value| matches!(field["type"].as_str(), Some("string" | "integer"));
                    wanted.push(fields.iter().find(|(_, field)| is_plain(field)).unwrap_or(&fields[0]));
                }
                wanted.into_iter().map(|(name, field)| ((*name).to_owned(), self.sample(field))).collect()
            }
            Some("string") => match schema["format"].as_str() {
                Some("date-time") => json!("2026-01-01T00:00:00Z"),
                Some("byte") => json!("eA=="),
                _ => json!("x"),
            },
            _ => json!(1),
        }
    }
}
