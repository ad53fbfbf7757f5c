//! `apply`: the documents of a client.

use proto::kubelet::apply_request::UnknownFields as WireUnknownFields;
use proto::kubelet::apply_response::result::Outcome as WireOutcome;
use proto::kubelet::{ApplyRequest, ApplyResponse, ObjectKey, apply_response};

use super::Error;
use crate::manifest::{self, Manifest, Reading, UnknownFields};
use crate::objects::EventType;
use crate::store::{Outcome, Source, Store};

/// Each object on its own: one that is refused does not keep the others from being applied.
pub(super) fn apply(store: &Store, request: &ApplyRequest) -> Result<ApplyResponse, Error> {
    let unknown_fields = match request.unknown_fields() {
        WireUnknownFields::Refuse => UnknownFields::Refuse,
        WireUnknownFields::Warn => UnknownFields::Warn,
        WireUnknownFields::Ignore => UnknownFields::Ignore,
    };
    let namespace = Some(request.namespace.clone()).filter(|namespace| !namespace.is_empty());
    let reading = Reading { unknown_fields, namespace };
    let parsed = manifest::parse_with(&request.documents, &request.source, &reading);
    if parsed.manifests.is_empty() && parsed.errors.is_empty() {
        return Err(Error::Invalid { mistakes: vec![format!("{}: no objects in it", request.source)] });
    }
    let mut answer = ApplyResponse::default();
    answer.failures.extend(parsed.errors.iter().map(ToString::to_string));
    for manifest in parsed.manifests {
        match apply_one(store, manifest) {
            Ok(result) => answer.results.push(result),
            Err(error) => answer.failures.push(linux::chain(&error)),
        }
    }
    Ok(answer)
}

fn apply_one(store: &Store, manifest: Manifest) -> Result<apply_response::Result, Error> {
    let reference = manifest.object.reference();
    let outcome = store.apply(manifest.described(), Source::Api)?;
    for warning in &manifest.warnings {
        store.record(&reference, EventType::Warning, "UnsupportedField", warning);
    }
    let outcome = match outcome {
        Outcome::Unchanged => WireOutcome::Unchanged,
        Outcome::Created => WireOutcome::Created,
        Outcome::Configured => WireOutcome::Configured,
    };
    Ok(apply_response::Result {
        key: Some(ObjectKey { kind: reference.kind, namespace: reference.namespace, name: reference.name }),
        outcome: outcome.into(),
        warnings: manifest.warnings,
    })
}
