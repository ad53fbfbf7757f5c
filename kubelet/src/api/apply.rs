//! `apply`: the documents of a client, all or none.

use proto::kubelet::apply_response::result::Outcome as WireOutcome;
use proto::kubelet::{ApplyRequest, ApplyResponse, ObjectKey, apply_response};

use super::Error;
use crate::manifest::{self, Manifest};
use crate::objects::EventType;
use crate::store::{Outcome, Source, Store};

/// Refuses all of a text that has one mistake: a client waits for the answer
/// and corrects it, where a file must be made the best of.
pub(super) fn apply(store: &Store, request: &ApplyRequest) -> Result<ApplyResponse, Error> {
    let text = std::str::from_utf8(&request.documents)
        .map_err(|cause| Error::Invalid { mistakes: vec![format!("{}: {cause}", request.source)] })?;
    let parsed = manifest::parse(text, &request.source);
    if !parsed.errors.is_empty() {
        let mistakes = parsed.errors.iter().map(ToString::to_string).collect();
        return Err(Error::Invalid { mistakes });
    }
    if parsed.manifests.is_empty() {
        return Err(Error::Invalid { mistakes: vec![format!("{}: no objects in it", request.source)] });
    }
    let results: Result<Vec<_>, Error> =
        parsed.manifests.into_iter().map(|manifest| apply_one(store, manifest)).collect();
    Ok(ApplyResponse { results: results? })
}

fn apply_one(store: &Store, manifest: Manifest) -> Result<apply_response::Result, Error> {
    let reference = manifest.object.reference();
    let outcome = store.apply(manifest.object, Source::Api)?;
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
