//! `delete`.

use std::io::{self, Write};

use proto::kubelet::kubelet_client::KubeletClient;
use proto::kubelet::{DeleteProgress, DeleteRequest, ObjectKey};
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Code, Streaming};

use super::failures::Failures;
use super::files::Directories;
use super::printable::printable;
use super::{Error, client, files, kinds};
use crate::config::DeleteArgs;
use crate::manifest::{self, Reading, UnknownFields};
use crate::objects::Kind;

/// Marks every object first and then waits for all of them at once. Goes on after an error.
pub(super) async fn delete(args: &DeleteArgs, out: &mut dyn Write) -> Result<(), Error> {
    let mut kubelet = client::connect(&args.root).await?;
    let mut failures = Failures::default();
    let keys = match &args.kind {
        Some(kind) => wanted(&mut kubelet, args, kind, out).await?,
        None => described(args, &mut failures)?,
    };
    let deadline = (!args.timeout.is_zero()).then(|| Instant::now() + args.timeout);
    // What is gone since the list was made is what was asked for.
    let may_be_gone = args.ignore_not_found || is_by_content(args);
    let mut waits = JoinSet::new();
    for key in keys {
        match begin(&mut kubelet, args, &key, out).await {
            Err(Error::Refused(status)) if status.code() == Code::NotFound && may_be_gone => {}
            Err(error) => failures.add(error)?,
            Ok(progress) => drop(waits.spawn(wait(progress, key, deadline))),
        }
    }
    while let Some(waited) = waits.join_next().await {
        failures.add_ended(waited)?;
    }
    failures.result()
}

/// Returns once the deletion is recorded; the stream ends when the object is gone.
async fn begin(
    kubelet: &mut KubeletClient<Channel>,
    args: &DeleteArgs,
    key: &ObjectKey,
    out: &mut dyn Write,
) -> Result<Streaming<DeleteProgress>, Error> {
    let shortened = if args.now { Some(1) } else { args.force.then_some(0) };
    let grace_period_seconds = args.grace_period.or(shortened);
    let request = DeleteRequest { key: Some(key.clone()), grace_period_seconds, wait: args.wait };
    let progress = kubelet.delete(request).await?.into_inner();
    let (resource, name) = (kinds::resource(key.kind.parse().map_err(unknown)?), &key.name);
    // Like kubectl, confirm once the deletion is recorded, before the wait.
    let confirmed = match &args.output {
        Some(_name) => writeln!(out, "{resource}/{name}"),
        None => writeln!(out, "{resource} \"{name}\" deleted"),
    };
    confirmed.and_then(|()| out.flush()).map_err(Error::Output)?;
    Ok(progress)
}

async fn wait(
    mut progress: Streaming<DeleteProgress>,
    key: ObjectKey,
    deadline: Option<Instant>,
) -> Result<(), Error> {
    let print = async {
        while let Some(step) = progress.message().await? {
            writeln!(io::stderr(), "{}", printable(&step.message)).map_err(Error::Output)?;
        }
        Ok(())
    };
    match deadline {
        None => print.await,
        Some(deadline) => {
            let subject = kinds::subject(key.kind.parse().map_err(unknown)?, &key.name);
            tokio::time::timeout_at(deadline, print).await.unwrap_or(Err(Error::TimedOut { subject }))
        }
    }
}

/// Whether objects are listed and then deleted.
fn is_by_content(args: &DeleteArgs) -> bool {
    args.all || !args.selection.is_empty()
}

/// By name, or by what they contain.
async fn wanted(
    kubelet: &mut KubeletClient<Channel>,
    args: &DeleteArgs,
    kind: &str,
    out: &mut dyn Write,
) -> Result<Vec<ObjectKey>, Error> {
    let selected = kinds::select(kind, &args.names)?;
    let by_content = is_by_content(args);
    for (_, names) in &selected {
        match (by_content, names.is_empty()) {
            (true, false) => {
                return Err(Error::Usage("name cannot be provided when a selector is specified"));
            }
            (false, true) => {
                return Err(Error::Usage("resource(s) were provided, but no name was specified"));
            }
            (true, true) | (false, false) => {}
        }
    }
    let mut keys = Vec::new();
    for (kind, names) in selected {
        if !by_content {
            if args.scope.all_namespaces {
                return Err(Error::Usage("a resource cannot be retrieved by name across all namespaces"));
            }
            let key = |name| ObjectKey {
                kind: kind.to_string(),
                namespace: args.scope.namespace().to_owned(),
                name,
            };
            keys.extend(names.into_iter().map(key));
            continue;
        }
        let objects = client::select(kubelet, kind, &args.scope, &args.selection).await?;
        keys.extend(objects.iter().map(|object| key_of(kind, object)));
    }
    if keys.is_empty() {
        writeln!(out, "No resources found").map_err(Error::Output)?;
    }
    Ok(keys)
}

fn key_of(kind: Kind, object: &Value) -> ObjectKey {
    let text = |name: &str| object["metadata"][name].as_str().unwrap_or_default().to_owned();
    ObjectKey { kind: kind.to_string(), namespace: text("namespace"), name: text("name") }
}

/// The objects in the files, later documents first: users come before what they use. A document with
/// mistakes does not keep the others' objects from being deleted.
fn described(args: &DeleteArgs, failures: &mut Failures) -> Result<Vec<ObjectKey>, Error> {
    let reading = Reading { unknown_fields: UnknownFields::Ignore, namespace: args.scope.namespace.clone() };
    let mut keys = Vec::new();
    for document in files::read(&args.filenames, Directories::of(args.recursive))? {
        let parsed = manifest::parse_with(&document.content, &document.source, &reading);
        if !parsed.errors.is_empty() {
            let mistakes = parsed.errors.iter().map(ToString::to_string).collect();
            failures.add(Error::Manifest { mistakes })?;
        }
        for manifest in parsed.manifests {
            let object = manifest.object.reference();
            keys.push(ObjectKey { kind: object.kind, namespace: object.namespace, name: object.name });
        }
    }
    keys.reverse();
    Ok(keys)
}

fn unknown(error: crate::objects::UnknownKind) -> Error {
    Error::UnknownKind { kind: error.kind }
}
