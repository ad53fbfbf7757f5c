//! Decides which volume a claim gets, from the objects alone (kubernetes,
//! pkg/controller/volume/persistentvolume).

use std::cmp::Reverse;
use std::collections::HashSet;
use std::sync::Arc;

use super::begun::Begun;
use super::pods_naming;
use crate::objects::{
    ClaimPhase, EventType, ObjectRef, PersistentVolume, PersistentVolumeClaim, Quantity, StorageClass,
    VolumeBindingMode, VolumePhase,
};
use crate::store::Store;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Decision {
    /// The claim is bound, or has lost its volume and waits for it.
    Nothing,
    /// The claim was bound, and its volume is gone or another claim's.
    Lose,
    Bind {
        volume: String,
    },
    Provision {
        class: Arc<StorageClass>,
    },
    Wait {
        event_type: EventType,
        reason: &'static str,
        message: String,
    },
}

/// `chosen`: the volumes that other claims are about to be bound to.
pub(super) fn decide(claim: &PersistentVolumeClaim, store: &Store, chosen: &HashSet<String>) -> Decision {
    let begun = Begun::of(claim).filter(|begun| !begun.is_refuted());
    let begun = begun.map(|begun| Arc::new(begun.class));
    let view = View {
        claim,
        source: if begun.is_none() { super::source::check(claim, store).err() } else { None },
        begun,
        volumes: &store.volumes(),
        chosen,
        classes: &store.classes(),
        has_consumer: !pods_naming(store, claim).is_empty(),
    };
    view.decide()
}

/// The volume that a claim was bound to.
enum Own {
    /// It does not exist, or is another claim's.
    Gone,
    /// It was applied anew, and does not know its claim yet.
    Free,
    Bound,
}

/// The inputs of the decision.
struct View<'a> {
    claim: &'a PersistentVolumeClaim,
    /// Why the claim's data source cannot be used yet.
    source: Option<String>,
    /// The class of a CreateVolume whose outcome is not known.
    begun: Option<Arc<StorageClass>>,
    volumes: &'a [Arc<PersistentVolume>],
    chosen: &'a HashSet<String>,
    classes: &'a [Arc<StorageClass>],
    has_consumer: bool,
}

impl View<'_> {
    fn decide(&self) -> Decision {
        let claim = &self.claim.spec;
        match (self.claim.status.phase, self.own_volume()) {
            (ClaimPhase::Pending, _) => {}
            (ClaimPhase::Bound, Own::Gone) => return Decision::Lose,
            (ClaimPhase::Bound, Own::Bound) | (ClaimPhase::Lost, Own::Gone) => return Decision::Nothing,
            (ClaimPhase::Lost, Own::Bound) | (_, Own::Free) => {
                return Decision::Bind { volume: claim.volume_name.clone() };
            }
        }
        if !claim.volume_name.is_empty() {
            return self.named_volume(&claim.volume_name);
        }
        let class = self.class();
        if self.begun.is_none()
            && let Some(Ok(class)) = &class
            && class.volume_binding_mode == VolumeBindingMode::WaitForFirstConsumer
            && !self.has_consumer
        {
            let message = "waiting for first consumer to be created before binding".to_owned();
            return Decision::Wait { event_type: EventType::Normal, reason: "WaitForFirstConsumer", message };
        }
        if let Some(volume) = self.best_volume() {
            return Decision::Bind { volume: volume.metadata.name.clone() };
        }
        if let Some(class) = &self.begun {
            return Decision::Provision { class: Arc::clone(class) };
        }
        match class {
            Some(Ok(_)) if claim.selector.is_some() => Decision::Wait {
                event_type: EventType::Warning,
                reason: "ProvisioningFailed",
                message: "no volume matches spec.selector, and a claim with a selector is not provisioned"
                    .to_owned(),
            },
            Some(Ok(class)) => match &self.source {
                None => Decision::Provision { class: Arc::clone(class) },
                Some(waiting) => Decision::Wait {
                    event_type: EventType::Normal,
                    reason: "WaitForDataSource",
                    message: waiting.clone(),
                },
            },
            Some(Err(name)) => Decision::Wait {
                event_type: EventType::Warning,
                reason: "ProvisioningFailed",
                message: format!(
                    "storageclass.storage.k8s.io \"{name}\" not found: apply it, or correct spec.storageClassName; \
                     classes: {}",
                    self.class_names().as_deref().unwrap_or("none")
                ),
            },
            None => Decision::Wait {
                event_type: EventType::Normal,
                reason: "FailedBinding",
                message: self.no_class_is_set(),
            },
        }
    }

    /// kubelet's words, and what to do.
    fn no_class_is_set(&self) -> String {
        let said = "no persistent volumes available for this claim and no storage class is set";
        // A default class is not for a claim that has an empty name.
        let may_have_default = self.claim.spec.storage_class_name.is_none();
        match (self.class_names(), may_have_default) {
            (None, true) => format!("{said}: apply a default StorageClass, or a volume that fits"),
            (None, false) => format!("{said}: apply a volume without a class that fits"),
            (Some(names), true) => format!(
                "{said}: make the claim anew with spec.storageClassName, or make a class the default; classes: {names}"
            ),
            (Some(names), false) => format!(
                "{said}: make the claim anew with a class, or apply a volume without one that fits; classes: {names}"
            ),
        }
    }

    fn class_names(&self) -> Option<String> {
        let mut names: Vec<&str> = self.classes.iter().map(|class| class.metadata.name.as_str()).collect();
        names.sort_unstable();
        (!names.is_empty()).then(|| names.join(", "))
    }

    fn own_volume(&self) -> Own {
        let claim = &self.claim;
        let named = self.volumes.iter().find(|volume| volume.metadata.name == claim.spec.volume_name);
        let Some(volume) = named else { return Own::Gone };
        match &volume.spec.claim_ref {
            Some(holder) if !self.is_this_claim(holder) => Own::Gone,
            Some(holder)
                if holder.uid == claim.metadata.uid && volume.status.phase != VolumePhase::Available =>
            {
                Own::Bound
            }
            _ => Own::Free,
        }
    }

    fn named_volume(&self, name: &str) -> Decision {
        let wait = |message: String| Decision::Wait {
            event_type: EventType::Warning,
            reason: "FailedBinding",
            message,
        };
        let Some(volume) = self.volumes.iter().find(|v| v.metadata.name == name) else {
            return wait(format!("volume \"{name}\" (spec.volumeName) not found"));
        };
        match (&volume.spec.claim_ref, self.mismatch(volume)) {
            (Some(holder), _) if !self.is_this_claim(holder) => {
                wait(format!("volume \"{name}\" already bound to a different claim."))
            }
            (None, Some(mismatch)) => Decision::Wait {
                event_type: EventType::Warning,
                reason: "VolumeMismatch",
                message: format!("Cannot bind to requested volume \"{name}\": {mismatch}"),
            },
            (Some(_), _) | (None, None) => Decision::Bind { volume: name.to_owned() },
        }
    }

    /// Why the volume does not satisfy the claim.
    fn mismatch(&self, volume: &PersistentVolume) -> Option<String> {
        let (wanted, offered) = (&self.claim.spec, &volume.spec);
        let (size, requested) = (offered.capacity.get("storage"), wanted.resources.requests.get("storage"));
        if volume.metadata.is_deleted() {
            Some("it is being deleted".to_owned())
        } else if size < requested {
            let shown = |size: Option<&Quantity>| size.map_or("0".to_owned(), Quantity::to_string);
            Some(format!("its capacity {} is below the requested {}", shown(size), shown(requested)))
        } else if offered.storage_class_name != self.class_name() {
            let (found, wanted) = (&offered.storage_class_name, self.class_name());
            Some(format!("its storageClassName is \"{found}\", the claim's \"{wanted}\""))
        } else if offered.volume_mode != wanted.volume_mode {
            Some("the volumeModes differ".to_owned())
        } else if !wanted.access_modes.iter().all(|mode| offered.access_modes.contains(mode)) {
            let (found, wanted) = (&offered.access_modes, &wanted.access_modes);
            Some(format!("its accessModes are {found:?}, the claim's {wanted:?}"))
        } else if wanted.selector.as_ref().is_some_and(|s| !s.matches(&volume.metadata.labels)) {
            Some("its labels do not match the claim's selector".to_owned())
        } else {
            None
        }
    }

    /// `None`: the claim names no class and there is no default. `Some(Err(name))`: the class does
    /// not exist.
    fn class(&self) -> Option<Result<&Arc<StorageClass>, &str>> {
        match self.claim.spec.storage_class_name.as_deref() {
            Some("") => None,
            Some(name) => Some(self.classes.iter().find(|c| c.metadata.name == name).ok_or(name)),
            // Of several default classes, Kubernetes takes the newest.
            None => {
                let defaults = self.classes.iter().filter(|c| c.is_default());
                defaults.max_by_key(|c| (c.metadata.creation_timestamp, Reverse(&c.metadata.name))).map(Ok)
            }
        }
    }

    fn class_name(&self) -> &str {
        match self.class() {
            Some(Ok(class)) => &class.metadata.name,
            Some(Err(name)) => name,
            None => "",
        }
    }

    /// The volume reserved for this claim, or the smallest sufficient one.
    fn best_volume(&self) -> Option<&PersistentVolume> {
        let fitting = self.volumes.iter().map(Arc::as_ref).filter(|v| self.fits(v));
        fitting
            .min_by_key(|v| (v.spec.claim_ref.is_none(), v.spec.capacity.get("storage").map(|q| q.value())))
    }

    fn fits(&self, volume: &PersistentVolume) -> bool {
        let offered = &volume.spec;
        let free = match &offered.claim_ref {
            Some(holder) => self.is_this_claim(holder),
            // An existing volume does not contain what a data source has.
            None => self.claim.spec.source().is_none(),
        };
        let unused = matches!(volume.status.phase, VolumePhase::Available | VolumePhase::Pending);
        free && !self.chosen.contains(&volume.metadata.name)
            && (unused || offered.claim_ref.is_some())
            && !matches!(volume.status.phase, VolumePhase::Released | VolumePhase::Failed)
            && self.mismatch(volume).is_none()
    }

    /// A claimRef may name the claim without its uid.
    fn is_this_claim(&self, holder: &ObjectRef) -> bool {
        let metadata = &self.claim.metadata;
        holder.namespace == metadata.namespace
            && holder.name == metadata.name
            && (holder.uid.is_empty() || holder.uid == metadata.uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(spec: serde_json::Value) -> PersistentVolumeClaim {
        serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": {"name": "data", "namespace": "default", "uid": "c1"}, "spec": spec
        }))
        .unwrap()
    }

    fn wanting_1gi(class: &str) -> PersistentVolumeClaim {
        claim(serde_json::json!({
            "accessModes": ["ReadWriteOnce"], "storageClassName": class,
            "resources": {"requests": {"storage": "1Gi"}}
        }))
    }

    fn volume(name: &str, size: &str, claim_ref: serde_json::Value) -> Arc<PersistentVolume> {
        serde_json::from_value(serde_json::json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name},
            "spec": {"capacity": {"storage": size}, "accessModes": ["ReadWriteOnce"], "claimRef": claim_ref}
        }))
        .map(Arc::new)
        .unwrap()
    }

    fn class(name: &str, mode: &str) -> Arc<StorageClass> {
        serde_json::from_value(serde_json::json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": {"name": name},
            "provisioner": "csi.example.com", "volumeBindingMode": mode
        }))
        .map(Arc::new)
        .unwrap()
    }

    fn decide(
        claim: &PersistentVolumeClaim,
        volumes: &[Arc<PersistentVolume>],
        classes: &[Arc<StorageClass>],
        has_consumer: bool,
    ) -> Decision {
        let chosen = &HashSet::new();
        View { claim, source: None, begun: None, volumes, chosen, classes, has_consumer }.decide()
    }

    #[test]
    fn a_claim_gets_its_reserved_volume_or_the_smallest_sufficient_one() {
        let none = serde_json::Value::Null;
        let mut volumes = vec![
            volume("small", "512Mi", none.clone()),
            volume("big", "5Gi", none.clone()),
            volume("fit", "1Gi", none),
        ];
        let bind = |name: &str| Decision::Bind { volume: name.to_owned() };
        assert_eq!(decide(&wanting_1gi(""), &volumes, &[], false), bind("fit"));
        let (wants, chosen) = (wanting_1gi(""), &HashSet::from(["fit".to_owned()]));
        let view = View {
            claim: &wants,
            source: None,
            begun: None,
            volumes: &volumes,
            chosen,
            classes: &[],
            has_consumer: false,
        };
        assert_eq!(view.decide(), bind("big"));
        let mine = serde_json::json!({"namespace": "default", "name": "data"});
        volumes.push(volume("mine", "9Gi", mine));
        let others = serde_json::json!({"namespace": "default", "name": "other"});
        volumes.push(volume("theirs", "1Gi", others));
        assert_eq!(decide(&wanting_1gi(""), &volumes, &[], false), bind("mine"));
    }

    #[test]
    fn a_class_provisions_at_once_or_for_its_first_consumer() {
        let immediate = class("fast", "Immediate");
        let late = class("late", "WaitForFirstConsumer");
        let classes = [Arc::clone(&immediate), Arc::clone(&late)];
        assert_eq!(
            decide(&wanting_1gi("fast"), &[], &classes, false),
            Decision::Provision { class: immediate }
        );
        let waits = decide(&wanting_1gi("late"), &[], &classes, false);
        assert!(matches!(waits, Decision::Wait { reason: "WaitForFirstConsumer", .. }), "{waits:?}");
        assert_eq!(decide(&wanting_1gi("late"), &[], &classes, true), Decision::Provision { class: late });
    }

    #[test]
    fn a_selector_chooses_among_volumes_and_is_never_provisioned() {
        let labelled = |name: &str, size: &str, tier: &str| {
            let mut volume = (*volume(name, size, serde_json::Value::Null)).clone();
            volume.metadata.labels.insert("tier".to_owned(), tier.to_owned());
            volume.spec.storage_class_name = "fast".to_owned();
            Arc::new(volume)
        };
        let mut wants = wanting_1gi("fast");
        wants.spec.selector = serde_json::from_value(serde_json::json!({
            "matchLabels": {"tier": "gold"},
            "matchExpressions": [{"key": "tier", "operator": "In", "values": ["gold", "silver"]}],
        }))
        .unwrap();
        let volumes = [labelled("iron", "1Gi", "iron"), labelled("gold", "2Gi", "gold")];
        let classes = [class("fast", "Immediate")];
        let bind = Decision::Bind { volume: "gold".to_owned() };
        assert_eq!(decide(&wants, &volumes, &classes, false), bind);
        let Decision::Wait { reason, message, .. } = decide(&wants, &volumes[..1], &classes, false) else {
            panic!("waits")
        };
        assert_eq!(reason, "ProvisioningFailed");
        assert!(message.contains("no volume matches spec.selector"), "{message}");
    }

    #[test]
    fn a_claim_with_a_data_source_gets_a_new_volume_or_one_reserved_for_it() {
        let mut wants = wanting_1gi("fast");
        let source = serde_json::json!({
            "apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "x",
        });
        wants.spec.data_source = serde_json::from_value(source.clone()).unwrap();
        wants.spec.data_source_ref = serde_json::from_value(source).unwrap();
        let fast = class("fast", "Immediate");
        let of_class = |claim_ref: serde_json::Value| {
            let mut volume = (*volume("v", "1Gi", claim_ref)).clone();
            volume.spec.storage_class_name = "fast".to_owned();
            [Arc::new(volume)]
        };
        let free = of_class(serde_json::Value::Null);
        let provision = Decision::Provision { class: Arc::clone(&fast) };
        assert_eq!(decide(&wants, &free, &[Arc::clone(&fast)], false), provision);
        let mine = of_class(serde_json::json!({"namespace": "default", "name": "data"}));
        assert_eq!(
            decide(&wants, &mine, &[Arc::clone(&fast)], false),
            Decision::Bind { volume: "v".to_owned() }
        );
        let source = Some("waiting for the data source: PVC x not found".to_owned());
        let chosen = &HashSet::new();
        let view = View {
            claim: &wants,
            source,
            begun: None,
            volumes: &free,
            chosen,
            classes: &[fast],
            has_consumer: false,
        };
        assert!(matches!(view.decide(), Decision::Wait { reason: "WaitForDataSource", .. }));
    }

    #[test]
    fn a_claim_that_was_bound_is_lost_without_its_volume_and_gets_no_other() {
        let mut wants = wanting_1gi("");
        wants.spec.volume_name = "v".to_owned();
        wants.status.phase = ClaimPhase::Bound;
        let other = volume("w", "2Gi", serde_json::Value::Null);
        assert_eq!(decide(&wants, std::slice::from_ref(&other), &[], false), Decision::Lose);
        let of_other = serde_json::json!({"namespace": "default", "name": "data", "uid": "c2"});
        assert_eq!(decide(&wants, &[volume("v", "1Gi", of_other.clone())], &[], false), Decision::Lose);
        let mine = serde_json::json!({"namespace": "default", "name": "data", "uid": "c1"});
        let mut bound = (*volume("v", "1Gi", mine.clone())).clone();
        bound.status.phase = VolumePhase::Bound;
        let bound = [Arc::new(bound)];
        assert_eq!(decide(&wants, &bound, &[], false), Decision::Nothing);
        let again = Decision::Bind { volume: "v".to_owned() };
        for holder in [serde_json::Value::Null, mine] {
            assert_eq!(
                decide(&wants, &[volume("v", "1Gi", holder)], &[], false),
                again,
                "it was applied anew"
            );
        }

        wants.status.phase = ClaimPhase::Lost;
        assert_eq!(decide(&wants, &[other], &[], false), Decision::Nothing);
        assert_eq!(decide(&wants, &[volume("v", "1Gi", of_other)], &[], false), Decision::Nothing);
        assert_eq!(decide(&wants, &bound, &[], false), again);
        assert_eq!(decide(&wants, &[volume("v", "1Gi", serde_json::Value::Null)], &[], false), again);
    }

    #[test]
    fn of_several_default_classes_the_newest_counts() {
        let default = |name: &str, second: i64| {
            let mut class = (*class(name, "Immediate")).clone();
            let annotation = ("storageclass.kubernetes.io/is-default-class".to_owned(), "true".to_owned());
            class.metadata.annotations.extend([annotation]);
            class.metadata.creation_timestamp = crate::objects::Time::from_second(second).ok();
            Arc::new(class)
        };
        let classes = [default("old", 1), default("b", 2), default("a", 2), class("other", "Immediate")];
        let mut wants = wanting_1gi("");
        wants.spec.storage_class_name = None;
        let newest = Decision::Provision { class: Arc::clone(&classes[2]) };
        assert_eq!(decide(&wants, &[], &classes, false), newest);
    }

    #[test]
    fn a_claim_without_a_class_learns_which_there_are() {
        let message = |class_name: Option<&str>, classes: &[Arc<StorageClass>]| {
            let mut wants = wanting_1gi("");
            wants.spec.storage_class_name = class_name.map(str::to_owned);
            match decide(&wants, &[], classes, true) {
                Decision::Wait { reason: "FailedBinding", message, .. } => message,
                other => panic!("{other:?}"),
            }
        };
        assert!(message(None, &[]).ends_with("apply a default StorageClass, or a volume that fits"));
        let two = [class("slow", "Immediate"), class("fast", "Immediate")];
        assert!(message(None, &two).ends_with("classes: fast, slow"));
        assert!(message(Some(""), &[]).ends_with("apply a volume without a class that fits"));
        assert!(message(Some(""), &two).ends_with("one that fits; classes: fast, slow"));
    }

    #[test]
    fn an_unknown_class_is_named() {
        let Decision::Wait { reason, message, .. } = decide(&wanting_1gi("nope"), &[], &[], true) else {
            panic!("waits")
        };
        assert_eq!(reason, "ProvisioningFailed");
        assert!(message.starts_with("storageclass.storage.k8s.io \"nope\" not found"), "{message}");
    }

    #[test]
    fn a_volume_of_another_claim_is_refused_by_name() {
        let others = serde_json::json!({"namespace": "default", "name": "other"});
        let wants = claim(serde_json::json!({"accessModes": ["ReadWriteOnce"], "volumeName": "v"}));
        let decision = decide(&wants, &[volume("v", "1Gi", others)], &[], false);
        assert!(matches!(decision, Decision::Wait { reason: "FailedBinding", .. }), "{decision:?}");
    }

    #[test]
    fn a_volume_requested_by_name_must_satisfy_the_claim() {
        let none = serde_json::Value::Null;
        let small = volume("v", "512Mi", none.clone());
        let named = |fields: serde_json::Value| {
            let mut spec = serde_json::json!({
                "accessModes": ["ReadWriteOnce"], "storageClassName": "", "volumeName": "v",
                "resources": {"requests": {"storage": "512Mi"}}
            });
            spec.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            claim(spec)
        };
        let decision = |claim: &PersistentVolumeClaim, volume: &Arc<PersistentVolume>| {
            decide(claim, std::slice::from_ref(volume), &[], false)
        };
        let bind = Decision::Bind { volume: "v".to_owned() };
        assert_eq!(decision(&named(serde_json::json!({})), &small), bind);
        let mut deleted = (*small).clone();
        deleted.metadata.deletion_timestamp = Some(crate::objects::now());
        for (fields, volume, words) in [
            (
                serde_json::json!({"resources": {"requests": {"storage": "1Gi"}}}),
                &small,
                "its capacity 512Mi is below the requested 1Gi",
            ),
            (
                serde_json::json!({"storageClassName": "good"}),
                &small,
                "its storageClassName is \"\", the claim's \"good\"",
            ),
            (serde_json::json!({"volumeMode": "Block"}), &small, "the volumeModes differ"),
            (
                serde_json::json!({"accessModes": ["ReadWriteMany"]}),
                &small,
                "its accessModes are [ReadWriteOnce], the claim's [ReadWriteMany]",
            ),
            (serde_json::json!({}), &Arc::new(deleted), "it is being deleted"),
        ] {
            let message = format!("Cannot bind to requested volume \"v\": {words}");
            let (event_type, reason) = (EventType::Warning, "VolumeMismatch");
            assert_eq!(decision(&named(fields), volume), Decision::Wait { event_type, reason, message });
        }
        // A volume's author may reserve it for a claim regardless of the size.
        let mine = serde_json::json!({"namespace": "default", "name": "data"});
        let wants_more = named(serde_json::json!({"resources": {"requests": {"storage": "1Gi"}}}));
        assert_eq!(decision(&wants_more, &volume("v", "512Mi", mine)), bind);
    }

    #[test]
    fn a_claim_that_names_no_class_gets_the_default() {
        let mut default = (*class("usual", "Immediate")).clone();
        let annotation = "storageclass.kubernetes.io/is-default-class";
        default.metadata.annotations.insert(annotation.to_owned(), "true".to_owned());
        let classes = [class("other", "Immediate"), Arc::new(default)];
        let size = serde_json::json!({"requests": {"storage": "1Gi"}});
        let wants = claim(serde_json::json!({"accessModes": ["ReadWriteOnce"], "resources": size}));
        let usual = Decision::Provision { class: Arc::clone(&classes[1]) };
        assert_eq!(decide(&wants, &[], &classes, false), usual);
        assert!(matches!(decide(&wanting_1gi(""), &[], &classes, false), Decision::Wait { .. }));
    }
}
