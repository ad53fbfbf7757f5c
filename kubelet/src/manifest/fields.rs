//! Fields of the Kubernetes API that this kubelet does not act on, and whether
//! an object may run without them.
//!
//! A field is refused where running without it would be wrong (another program
//! order, fewer files, less isolation than asked), ignored with a warning where
//! it is merely not done, and harmless where it means nothing on one machine.
//! `docs/FIELDS.md` shows this table beside the fields that have an effect; a test compares.

use super::kubernetes::{self, Lookup, VERSION};
use super::path::Segment;
use super::read::Unknown;
use super::scalar::Scalar;
use super::tree::{Node, Value};
use crate::objects::Kind;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing is lost, for this reason.
    Harmless(&'static str),
    /// The object is taken, with a warning that says what does not happen.
    Ignored(&'static str),
    /// The object is not taken, and this is why.
    Refused(&'static str),
}

/// One row: all fields at and below `field`.
#[derive(Debug, Clone, Copy)]
pub struct FieldRule {
    /// `None`: every kind.
    pub kind: Option<Kind>,
    /// `[*]` stands for any index, and `containers[*]` for init containers too.
    pub field: &'static str,
    pub verdict: Verdict,
}

const fn any(field: &'static str, verdict: Verdict) -> FieldRule {
    FieldRule { kind: None, field, verdict }
}

const fn pod(field: &'static str, verdict: Verdict) -> FieldRule {
    FieldRule { kind: Some(Kind::Pod), field, verdict }
}

const fn claim(field: &'static str, verdict: Verdict) -> FieldRule {
    FieldRule { kind: Some(Kind::PersistentVolumeClaim), field, verdict }
}

const fn volume(field: &'static str, verdict: Verdict) -> FieldRule {
    FieldRule { kind: Some(Kind::PersistentVolume), field, verdict }
}

const fn class(field: &'static str, verdict: Verdict) -> FieldRule {
    FieldRule { kind: Some(Kind::StorageClass), field, verdict }
}

const fn driver(field: &'static str, verdict: Verdict) -> FieldRule {
    FieldRule { kind: Some(Kind::CsiDriver), field, verdict }
}

const fn snapshot_class(field: &'static str, verdict: Verdict) -> FieldRule {
    FieldRule { kind: Some(Kind::VolumeSnapshotClass), field, verdict }
}

const fn content(field: &'static str, verdict: Verdict) -> FieldRule {
    FieldRule { kind: Some(Kind::VolumeSnapshotContent), field, verdict }
}

use Verdict::{Harmless, Ignored, Refused};

const ONE_NODE: Verdict = Ignored("there is one node");
const RUNS_HERE: Verdict = Ignored("there is one node, and the pod runs on it");
const NO_ACCOUNTS: Verdict = Ignored("there are no service accounts, and no tokens");
const SERVERS: Verdict = Harmless("an API server writes it");
const OURS: Verdict = Harmless("the kubelet writes it");
const NO_SCHEDULER: Verdict = Harmless("there is one node and no scheduler");
const NO_NAMESPACE: Verdict = Harmless("objects of this kind are in no namespace");
const WINDOWS: Verdict = Harmless("it is for Windows");
const LESS_ISOLATION: Verdict = Refused("the pod would be less isolated than it asks to be");

const VOLUMES: &str = "supported volumes are emptyDir, hostPath, persistentVolumeClaim, configMap, secret, projected, downwardAPI and ephemeral";

/// The first row that matches decides.
pub const FIELD_TABLE: &[FieldRule] = &[
    any("metadata.resourceVersion", SERVERS),
    pod("metadata.generation", OURS),
    any("metadata.generation", SERVERS),
    any("metadata.selfLink", SERVERS),
    any("metadata.managedFields", SERVERS),
    any("metadata.generateName", Harmless("the object has its name already")),
    any("metadata.ownerReferences", OURS),
    any("metadata.uid", OURS),
    any("metadata.creationTimestamp", OURS),
    any("metadata.deletionTimestamp", OURS),
    any("metadata.deletionGracePeriodSeconds", OURS),
    any("metadata.finalizers", Ignored("deletion waits for the volumes and for nothing else")),
    any("status", OURS),
    pod("spec.ephemeralContainers", Refused("a manifest cannot describe them")),
    pod("spec.hostUsers", LESS_ISOLATION),
    pod("spec.runtimeClassName", Refused("there is one runtime")),
    pod("spec.schedulerName", NO_SCHEDULER),
    pod("spec.tolerations", Harmless("the node has no taints")),
    pod("spec.preemptionPolicy", Harmless("only critical pods preempt, with any policy")),
    pod("spec.enableServiceLinks", Harmless("there are no services")),
    pod("spec.automountServiceAccountToken", NO_ACCOUNTS),
    pod("spec.serviceAccount", NO_ACCOUNTS),
    pod("spec.nodeSelector", RUNS_HERE),
    pod("spec.affinity", RUNS_HERE),
    pod("spec.topologySpreadConstraints", RUNS_HERE),
    pod("spec.schedulingGates", Refused("nothing would ever open them")),
    pod("spec.resourceClaims", Refused("there are no devices to claim")),
    pod("spec.overhead", Ignored("it is not counted")),
    pod("spec.resources", Ignored("only the containers' own limits hold")),
    pod("spec.securityContext.seLinuxOptions", LESS_ISOLATION),
    pod("spec.securityContext.appArmorProfile", LESS_ISOLATION),
    pod("spec.securityContext.windowsOptions", WINDOWS),
    pod("spec.containers[*].lifecycle.postStart.tcpSocket", Refused("hooks are exec, httpGet and sleep")),
    pod("spec.containers[*].lifecycle.preStop.tcpSocket", Refused("hooks are exec, httpGet and sleep")),
    pod("spec.containers[*].env[*].valueFrom", Refused("the variable would be empty")),
    pod("spec.containers[*].resources.claims", Refused("there are no devices to claim")),
    pod("spec.containers[*].volumeDevices", Refused("volumes are file systems")),
    pod("spec.containers[*].securityContext.procMount", LESS_ISOLATION),
    pod("spec.containers[*].securityContext.seLinuxOptions", LESS_ISOLATION),
    pod("spec.containers[*].securityContext.appArmorProfile", LESS_ISOLATION),
    pod("spec.containers[*].securityContext.windowsOptions", WINDOWS),
    pod(
        "spec.volumes[*].projected.sources[*]",
        Refused("supported sources are configMap, secret and downwardAPI"),
    ),
    pod("spec.volumes[*].ephemeral", Refused("the claim would be made without it")),
    pod("spec.volumes[*]", Refused(VOLUMES)),
    claim("spec.dataSourceRef.namespace", Refused("the source is in the claim's namespace")),
    claim("spec.volumeAttributesClassName", Ignored("the volume is made with its class's parameters")),
    volume("spec.csi.controllerPublishSecretRef", Harmless("volumes are not attached")),
    volume("spec.nodeAffinity", ONE_NODE),
    volume("spec.claimRef.resourceVersion", SERVERS),
    volume("spec.claimRef", Ignored("a claim is known by its namespace, name and uid")),
    volume("spec.volumeAttributesClassName", Harmless("the driver has applied it already")),
    volume("spec", Refused("the supported volumes are csi")),
    volume("metadata.namespace", NO_NAMESPACE),
    class("metadata.namespace", NO_NAMESPACE),
    class("allowedTopologies", ONE_NODE),
    driver("metadata.namespace", NO_NAMESPACE),
    driver("spec.tokenRequests", NO_ACCOUNTS),
    driver("spec.seLinuxMount", Harmless("pods that ask for SELinux are refused")),
    driver("spec.nodeAllocatableUpdatePeriodSeconds", NO_SCHEDULER),
    driver("spec.serviceAccountTokenInSecrets", Harmless("there are no tokens")),
    driver("spec.preventPodSchedulingIfMissing", NO_SCHEDULER),
    driver("spec.storageCapacity", NO_SCHEDULER),
    driver("spec.volumeLifecycleModes", Harmless("volumes without a claim are refused")),
    snapshot_class("metadata.namespace", NO_NAMESPACE),
    content("metadata.namespace", NO_NAMESPACE),
    content("spec.sourceVolumeMode", Harmless("every volume is a file system")),
    content("spec.volumeSnapshotRef.resourceVersion", SERVERS),
    content("spec.volumeSnapshotRef", Ignored("a snapshot is known by its namespace, name and uid")),
];

/// The only field whose default is `true` and whose `false` asks for something.
const TRUE_BY_DEFAULT: &str = "spec.hostUsers";
/// Fields whose default is a word, and that word.
const WORDS_BY_DEFAULT: &[(&str, &str)] = &[("spec.containers[*].securityContext.procMount", "Default")];

/// What a field that the object's type does not have means for the object.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Judgement {
    /// Nothing is lost.
    Harmless,
    /// The field has no effect, for this reason.
    Ignored(&'static str),
    /// The object is not taken; the message says what is wrong with the field.
    Refused(String),
    /// Kubernetes does not have the field; the message says so.
    Misspelt(String),
}

/// A field of Kubernetes in no row of the table.
const NO_RULE: Verdict = Ignored("Kubernetes has this field, but this kubelet does not honour it");

/// Only a field in no row, or in one that refuses, is looked up in the types of
/// Kubernetes: such a row may cover misspelt fields (`spec.volumes[0].emptyDr`).
pub(super) fn judge(kind: Kind, unknown: &Unknown<'_>) -> Judgement {
    let verdict = verdict(kind, unknown.path.segments()).unwrap_or(NO_RULE);
    if (verdict == NO_RULE || matches!(verdict, Refused(_)))
        && let Lookup::Unknown { similar } = kubernetes::look_up(kind, &unknown.path)
    {
        return Judgement::Misspelt(misspelt(similar));
    }
    match verdict {
        _ if asks_for_nothing(unknown) => Judgement::Harmless,
        Harmless(_) => Judgement::Harmless,
        Ignored(effect) => Judgement::Ignored(effect),
        Refused(reason) => Judgement::Refused(format!("not supported: {reason}")),
    }
}

fn verdict(kind: Kind, segments: &[Segment]) -> Option<Verdict> {
    let mut rules = FIELD_TABLE.iter().filter(|rule| rule.kind.is_none_or(|its| its == kind));
    rules.find(|rule| covers(rule.field, segments)).map(|rule| rule.verdict)
}

fn misspelt(similar: Option<&str>) -> String {
    match similar {
        Some(similar) => {
            format!("unknown field, misspelt? Kubernetes {VERSION} has {similar} here")
        }
        None => format!("unknown field, misspelt? Kubernetes {VERSION} does not have it here"),
    }
}

/// What says nothing (`hostPID: false`, `initContainers: []`) loses nothing.
fn asks_for_nothing(unknown: &Unknown<'_>) -> bool {
    let default = unknown.path.to_string() == TRUE_BY_DEFAULT;
    says_nothing(unknown.node, default) || is_default_word(unknown.node, unknown.path.segments())
}

fn says_nothing(node: &Node<'_>, default: bool) -> bool {
    match &node.value {
        Value::Scalar(Scalar::Null) => true,
        Value::Scalar(Scalar::Bool(flag)) => *flag == default,
        Value::Scalar(Scalar::Text(text)) => text.is_empty(),
        Value::Scalar(Scalar::Integer(_) | Scalar::Unsigned(_) | Scalar::Float(_)) => false,
        Value::Sequence(items) => items.is_empty(),
        Value::Mapping(entries) => entries.is_empty(),
    }
}

fn is_default_word(node: &Node<'_>, segments: &[Segment]) -> bool {
    let Value::Scalar(Scalar::Text(text)) = &node.value else { return false };
    WORDS_BY_DEFAULT.iter().any(|(field, word)| covers(field, segments) && text == word)
}

fn covers(pattern: &str, segments: &[Segment]) -> bool {
    let mut rest = segments.iter();
    pattern.split('.').all(|part| {
        let (name, indexed) = part.strip_suffix("[*]").map_or((part, false), |name| (name, true));
        // Rows for containers hold for init containers.
        let is_name = |key: &str| key == name || (name == "containers" && key == "initContainers");
        matches!(rest.next(), Some(Segment::Key(key)) if is_name(key))
            && (!indexed || matches!(rest.next(), Some(Segment::Index(_))))
    })
}
