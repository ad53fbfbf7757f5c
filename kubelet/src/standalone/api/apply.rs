//! `apply`: the documents of a client, all or none.

use proto::kubelet::apply_response::result::Outcome as WireOutcome;
use proto::kubelet::{ApplyRequest, ApplyResponse, ObjectKey, apply_response};

use super::Error;
use crate::manifest::{self, Manifest, ManifestError};
use crate::objects::EventType;
use crate::standalone::store::{Outcome, Source, Store};

/// An error travels in an HTTP header, where 16 KiB is the client's limit for
/// all of them and some characters take three bytes.
const ANSWER_BYTES: usize = 4 << 10;

/// Refuses all of a text that has one mistake: a client waits for the answer
/// and corrects it, where a file must be made the best of.
pub(super) fn apply(store: &Store, request: &ApplyRequest) -> Result<ApplyResponse, Error> {
    let parsed = manifest::parse(&request.documents, &request.source);
    if !parsed.errors.is_empty() {
        return Err(Error::Invalid { mistakes: shown(&parsed.errors) });
    }
    if parsed.manifests.is_empty() {
        return Err(Error::Invalid { mistakes: vec![format!("{}: no objects in it", request.source)] });
    }
    let results: Result<Vec<_>, Error> =
        parsed.manifests.into_iter().map(|manifest| apply_one(store, manifest)).collect();
    Ok(ApplyResponse { results: results? })
}

/// The first mistakes, as many as fit.
fn shown(errors: &[ManifestError]) -> Vec<String> {
    let mut bytes = 0;
    let mut mistakes: Vec<String> = errors.iter().map(ToString::to_string).collect();
    let fitting = mistakes.iter().take_while(|mistake| {
        bytes += mistake.len();
        bytes <= ANSWER_BYTES
    });
    let fitting = fitting.count().max(1);
    if fitting < mistakes.len() {
        let more = mistakes.len() - fitting;
        mistakes.truncate(fitting);
        mistakes.push(format!("{more} more mistakes"));
    }
    mistakes
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
