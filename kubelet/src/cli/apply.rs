//! `apply -f`.

use std::io::{self, Write};

use proto::kubelet::apply_response::result::Outcome;
use proto::kubelet::{ApplyRequest, ApplyResponse};

use super::{Error, client, files};
use crate::config::ApplyArgs;

pub(super) async fn apply(args: &ApplyArgs, out: &mut dyn Write) -> Result<(), Error> {
    let documents = files::read(&args.filenames)?;
    let mut kubelet = client::connect(&args.root).await?;
    for document in documents {
        let request = ApplyRequest { documents: document.content, source: document.source };
        let answer = kubelet.apply(request).await?.into_inner();
        write_results(&answer, out).map_err(Error::Output)?;
    }
    Ok(())
}

fn write_results(answer: &ApplyResponse, out: &mut dyn Write) -> io::Result<()> {
    for result in &answer.results {
        for warning in &result.warnings {
            writeln!(io::stderr(), "Warning: {warning}")?;
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
