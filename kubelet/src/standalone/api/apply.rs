//! `apply`: the documents of a client.

use proto::kubelet::apply_request::UnknownFields as WireUnknownFields;
use proto::kubelet::apply_response::result::Outcome as WireOutcome;
use proto::kubelet::{ApplyRequest, ApplyResponse, ObjectKey, apply_response};

use super::Error;
use crate::manifest::{self, Manifest, Reading, UnknownFields};
use crate::objects::EventType;
use crate::store::{AnyObject, Outcome, Source, Store};

/// NAME_MAX of the directory of a pod's logs, `<namespace>_<name>_<uid>`, without its uid.
const MOST_NAME_BYTES: usize = 255 - "__".len() - "12345678-1234-1234-1234-123456789012".len();

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
    check_log_directory(&manifest.object)?;
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

/// Like the rule for all manifests. The pod's uid is longer here than that of a pod from a file.
fn check_log_directory(object: &AnyObject) -> Result<(), Error> {
    let AnyObject::Pod(pod) = object else { return Ok(()) };
    let name = &pod.metadata.name;
    let bytes = pod.metadata.namespace.len() + name.len();
    if bytes <= MOST_NAME_BYTES {
        return Ok(());
    }
    let mistake = format!(
        "Pod {name:?} is invalid: metadata.name: Too long: may not be more than {MOST_NAME_BYTES} bytes together \
         with the namespace, has {bytes}: both are in the name of the directory of the pod's logs"
    );
    Err(Error::Invalid { mistakes: vec![mistake] })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_applied_pod_has_a_log_directory_whose_name_is_not_too_long() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(dir.path(), "node").unwrap();
        let name = vec!["x".repeat(60); 5].join(".");
        let applied = |bytes: usize| {
            let name = &name[..bytes];
            let text = format!(
                "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}}}\n\
                 spec:\n  containers:\n  - {{name: c, image: \"demo:1\"}}\n"
            );
            let request = ApplyRequest { documents: text.into_bytes(), ..ApplyRequest::default() };
            let failures = apply(&store, &request).unwrap().failures;
            (failures, store.pod("default", name))
        };
        let (failures, pod) = applied(210);
        let directory = crate::logs::log_directory(dir.path(), &pod.unwrap().metadata);
        assert_eq!((failures, directory.file_name().unwrap().len()), (Vec::new(), 255));
        let (failures, pod) = applied(211);
        let expected =
            "metadata.name: Too long: may not be more than 217 bytes together with the namespace, has 218";
        assert!(failures.len() == 1 && failures[0].contains(expected), "{failures:?}");
        assert_eq!(pod, None);
    }
}
