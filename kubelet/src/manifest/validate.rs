//! The rules of Kubernetes' API server, in its words, as far as they concern
//! the fields that this kubelet has.

mod configuration;
mod lifecycle;
mod names;
mod network;
mod pod;
mod snapshots;
mod sources;
mod storage;

use super::path::FieldPath;
use crate::objects::{Container, ObjectMeta, PodSpec, Resources};
use crate::store::AnyObject;

/// Keys and values of one object's labels or annotations together (apimachinery, `TotalAnnotationSizeLimitB`).
const MAX_MAP_BYTES: usize = 256 * 1024;
/// PATH_MAX without its terminating zero.
const MAX_PATH_BYTES: usize = 4095;
/// A registry's name, a repository of 255 bytes, a tag of 128 and a digest.
const MAX_IMAGE_BYTES: usize = 1024;

/// A field that breaks a rule.
#[derive(Debug)]
pub(super) struct Invalid {
    pub(super) field: FieldPath,
    pub(super) message: String,
}

/// Every broken rule, in the order of the fields.
pub(super) fn object(object: &AnyObject) -> Vec<Invalid> {
    let mut findings = Findings::default();
    metadata(object.metadata(), &mut findings);
    match object {
        AnyObject::Pod(pod) => pod::check(pod, &mut findings),
        AnyObject::Volume(volume) => storage::check_volume(volume, &mut findings),
        AnyObject::Claim(claim) => storage::check_claim(claim, &mut findings),
        AnyObject::Class(class) => storage::check_class(class, &mut findings),
        AnyObject::CsiDriver(_) => {}
        AnyObject::Snapshot(snapshot) => snapshots::check_snapshot(snapshot, &mut findings),
        AnyObject::SnapshotClass(class) => snapshots::check_class(class, &mut findings),
        AnyObject::SnapshotContent(content) => snapshots::check_content(content, &mut findings),
        AnyObject::ConfigMap(map) => configuration::check_config_map(map, &mut findings),
        AnyObject::Secret(secret) => configuration::check_secret(secret, &mut findings),
    }
    findings.0
}

/// Collects broken rules.
#[derive(Debug, Default)]
struct Findings(Vec<Invalid>);

impl Findings {
    fn add(&mut self, field: FieldPath, message: impl Into<String>) {
        self.0.push(Invalid { field, message: message.into() });
    }

    fn required(&mut self, field: FieldPath) {
        self.add(field, "Required value");
    }

    fn invalid(&mut self, field: FieldPath, value: &str, rule: &str) {
        self.add(field, format!("Invalid value: {value:?}: {rule}"));
    }

    fn duplicate(&mut self, field: FieldPath, value: &str) {
        self.add(field, format!("Duplicate value: {value:?}"));
    }

    /// A required name that keeps `rule`.
    fn name(&mut self, field: FieldPath, value: &str, rule: names::Rule) {
        if value.is_empty() {
            self.required(field);
        } else if let Err(broken) = rule(value) {
            self.invalid(field, value, &broken);
        }
    }

    fn length(&mut self, field: FieldPath, bytes: usize, most: usize) {
        if bytes > most {
            self.add(field, format!("Too long: may not be more than {most} bytes, has {bytes}"));
        }
    }

    fn amounts(&mut self, field: &FieldPath, amounts: &Resources) {
        for (name, amount) in amounts.iter().filter(|(_, amount)| amount.is_negative()) {
            self.invalid(field.key(name), &amount.to_string(), "must be greater than or equal to 0");
        }
    }
}

fn metadata(meta: &ObjectMeta, findings: &mut Findings) {
    let at = FieldPath::root().key("metadata");
    findings.name(at.key("name"), &meta.name, names::subdomain);
    if !meta.namespace.is_empty() {
        findings.name(at.key("namespace"), &meta.namespace, names::label);
    }
    labels(&at, meta, findings);
}

/// Init containers, then containers, each with its place. `at` is that of the specification.
fn all_containers<'a>(
    at: &FieldPath,
    spec: &'a PodSpec,
) -> impl Iterator<Item = (FieldPath, &'a Container)> + use<'a> {
    let placed = |name: &str, containers: &'a [Container]| {
        let at = at.key(name);
        containers.iter().enumerate().map(move |(index, container)| (at.index(index), container))
    };
    placed("initContainers", &spec.init_containers).chain(placed("containers", &spec.containers))
}

/// Labels and annotations of `at`.
fn labels(at: &FieldPath, meta: &ObjectMeta, findings: &mut Findings) {
    for (key, value) in &meta.labels {
        let field = at.key("labels").key(key);
        if let Err(broken) = names::qualified(key) {
            findings.invalid(at.key("labels"), key, &broken);
        } else if let Err(broken) = names::label_value(value) {
            findings.invalid(field, value, &broken);
        }
    }
    for key in meta.annotations.keys() {
        // Kubernetes compares annotation keys without regard to case.
        if let Err(broken) = names::qualified(&key.to_lowercase()) {
            findings.invalid(at.key("annotations"), key, &broken);
        }
    }
    // Kubernetes has no limit of labels but that of etcd's requests.
    for (field, map) in [("labels", &meta.labels), ("annotations", &meta.annotations)] {
        let bytes: usize = map.iter().map(|(key, value)| key.len() + value.len()).sum();
        findings.length(at.key(field), bytes, MAX_MAP_BYTES);
    }
}
