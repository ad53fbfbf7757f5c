//! `delete`.

use std::io::{self, Write};

use proto::kubelet::kubelet_client::KubeletClient;
use proto::kubelet::{DeleteRequest, ObjectKey};
use tonic::Code;
use tonic::transport::Channel;

use super::{Error, client, files, kinds};
use crate::config::DeleteArgs;
use crate::manifest;

/// Goes on after an object that cannot be deleted; the last error counts.
pub(super) async fn delete(args: &DeleteArgs, out: &mut dyn Write) -> Result<(), Error> {
    let keys = wanted(args)?;
    if keys.is_empty() {
        return Err(Error::Usage("resource(s) were provided, but no name was specified"));
    }
    let mut kubelet = client::connect(&args.root).await?;
    let mut last_error = None;
    for key in keys {
        match delete_one(&mut kubelet, args, &key, out).await {
            Err(Error::Refused(status)) if status.code() == Code::NotFound && args.ignore_not_found => {}
            Err(Error::Output(cause)) => return Err(Error::Output(cause)),
            Err(error) => {
                if let Some(before) = last_error.replace(error) {
                    drop(writeln!(io::stderr(), "{}", super::describe_error(&before)));
                }
            }
            Ok(()) => {}
        }
    }
    last_error.map_or(Ok(()), Err)
}

async fn delete_one(
    kubelet: &mut KubeletClient<Channel>,
    args: &DeleteArgs,
    key: &ObjectKey,
    out: &mut dyn Write,
) -> Result<(), Error> {
    let request =
        DeleteRequest { key: Some(key.clone()), grace_period_seconds: args.grace_period, wait: args.wait };
    let mut progress = kubelet.delete(request).await?.into_inner();
    let (resource, name) = (kinds::resource(key.kind.parse().map_err(unknown)?), &key.name);
    // As kubectl: said when it is on record, while the wait goes on.
    writeln!(out, "{resource} \"{name}\" deleted").and_then(|()| out.flush()).map_err(Error::Output)?;
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

/// What the files describe, users before what they use: later documents first.
fn described(args: &DeleteArgs) -> Result<Vec<ObjectKey>, Error> {
    let mut keys = Vec::new();
    for document in files::read(&args.filenames)? {
        let text = String::from_utf8_lossy(&document.content);
        let parsed = manifest::parse(&text, &document.source);
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
