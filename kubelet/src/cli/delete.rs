//! `delete`.

use std::io::{self, Write};

use proto::kubelet::kubelet_client::KubeletClient;
use proto::kubelet::{DeleteProgress, DeleteRequest, ObjectKey};
use tokio::task::JoinSet;
use tonic::transport::Channel;
use tonic::{Code, Streaming};

use super::{Error, client, files, kinds};
use crate::config::DeleteArgs;
use crate::manifest;

/// Marks every object first and then waits for all of them at once. Continues after an error and
/// returns the last one.
pub(super) async fn delete(args: &DeleteArgs, out: &mut dyn Write) -> Result<(), Error> {
    let keys = wanted(args)?;
    if keys.is_empty() {
        return Err(Error::Usage("resource(s) were provided, but no name was specified"));
    }
    let mut kubelet = client::connect(&args.root).await?;
    let mut errors = Errors::default();
    let mut waits = JoinSet::new();
    for key in keys {
        match begin(&mut kubelet, args, &key, out).await {
            Err(Error::Refused(status)) if status.code() == Code::NotFound && args.ignore_not_found => {}
            Err(Error::Output(cause)) => return Err(Error::Output(cause)),
            Err(error) => errors.add(error),
            Ok(progress) => drop(waits.spawn(print_progress(progress))),
        }
    }
    while let Some(waited) = waits.join_next().await {
        if let Ok(Err(error)) = waited {
            errors.add(error);
        }
    }
    errors.last.map_or(Ok(()), Err)
}

/// Prints each error when the next one arrives; keeps the last.
#[derive(Debug, Default)]
struct Errors {
    last: Option<Error>,
}

impl Errors {
    fn add(&mut self, error: Error) {
        if let Some(before) = self.last.replace(error) {
            let _no_reader = writeln!(io::stderr(), "{}", super::describe_error(&before));
        }
    }
}

/// Returns once the deletion is recorded; the stream ends when the object is gone.
async fn begin(
    kubelet: &mut KubeletClient<Channel>,
    args: &DeleteArgs,
    key: &ObjectKey,
    out: &mut dyn Write,
) -> Result<Streaming<DeleteProgress>, Error> {
    let request =
        DeleteRequest { key: Some(key.clone()), grace_period_seconds: args.grace_period, wait: args.wait };
    let progress = kubelet.delete(request).await?.into_inner();
    let (resource, name) = (kinds::resource(key.kind.parse().map_err(unknown)?), &key.name);
    // Like kubectl, confirm once the deletion is recorded, before the wait.
    writeln!(out, "{resource} \"{name}\" deleted").and_then(|()| out.flush()).map_err(Error::Output)?;
    Ok(progress)
}

async fn print_progress(mut progress: Streaming<DeleteProgress>) -> Result<(), Error> {
    while let Some(step) = progress.message().await? {
        writeln!(io::stderr(), "{}", step.message).map_err(Error::Output)?;
    }
    Ok(())
}

fn wanted(args: &DeleteArgs) -> Result<Vec<ObjectKey>, Error> {
    match &args.kind {
        Some(kind) => {
            let mut keys = Vec::new();
            for (kind, names) in kinds::select(kind, &args.names)? {
                keys.extend(names.into_iter().map(|name| ObjectKey {
                    kind: kind.to_string(),
                    namespace: args.namespace.clone(),
                    name,
                }));
            }
            Ok(keys)
        }
        None => described(args),
    }
}

/// The objects in the files, later documents first: users come before what they use.
fn described(args: &DeleteArgs) -> Result<Vec<ObjectKey>, Error> {
    let mut keys = Vec::new();
    for document in files::read(&args.filenames)? {
        let parsed = manifest::parse(&document.content, &document.source);
        if !parsed.errors.is_empty() {
            let mistakes = parsed.errors.iter().map(ToString::to_string).collect();
            return Err(Error::Manifest { mistakes });
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
