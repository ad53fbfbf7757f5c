//! `apply -f`.

use std::io::{self, Write};

use proto::kubelet::apply_request::UnknownFields;
use proto::kubelet::apply_response::result::Outcome;
use proto::kubelet::{ApplyRequest, ApplyResponse};

use super::failures::Failures;
use super::files::Directories;
use super::printable::printable;
use super::{Error, client, files};
use crate::config::{ApplyArgs, Validation};

/// Goes on after an object that is refused.
pub(super) async fn apply(args: &ApplyArgs, out: &mut dyn Write) -> Result<(), Error> {
    let documents = files::read(&args.filenames, Directories::of(args.recursive))?;
    let mut kubelet = client::connect(&args.root).await?;
    let unknown_fields = match args.validate {
        Validation::Strict => UnknownFields::Refuse,
        Validation::Warn => UnknownFields::Warn,
        Validation::Ignore => UnknownFields::Ignore,
    };
    let mut failures = Failures::default();
    for document in documents {
        let request = ApplyRequest {
            documents: document.content,
            source: document.source,
            unknown_fields: unknown_fields.into(),
            namespace: args.namespace.clone().unwrap_or_default(),
        };
        match kubelet.apply(request).await {
            Ok(answer) => {
                let answer = answer.into_inner();
                write_results(&answer, out).map_err(Error::Output)?;
                if !answer.failures.is_empty() {
                    failures.add(Error::Manifest { mistakes: answer.failures })?;
                }
            }
            Err(status) => failures.add(status.into())?,
        }
    }
    failures.result()
}

fn write_results(answer: &ApplyResponse, out: &mut dyn Write) -> io::Result<()> {
    for result in &answer.results {
        for warning in &result.warnings {
            writeln!(io::stderr(), "Warning: {}", printable(warning))?;
        }
        let outcome = match result.outcome() {
            Outcome::Unchanged => "unchanged",
            Outcome::Created => "created",
            Outcome::Configured => "configured",
        };
        let key = result.key.clone().unwrap_or_default();
        writeln!(out, "{} {outcome}", client::title(&key))?;
    }
    Ok(())
}
