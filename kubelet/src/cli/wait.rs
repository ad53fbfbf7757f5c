//! `wait --for`.

use std::collections::BTreeMap;
use std::io::Write;
use std::time::Duration;

use proto::kubelet::kubelet_client::KubeletClient;
use proto::kubelet::watch_event::Type;
use serde_json::Value;
use tokio::time::{Instant, timeout_at};
use tonic::Code;
use tonic::transport::Channel;

use super::failures::Failures;
use super::watch::{self, Watch};
use super::{Error, client, kinds};
use crate::command_line::durations::Span;
use crate::command_line::jsonpath;
use crate::config::{WaitArgs, WaitFor};
use crate::objects::Kind;

/// kubectl's word for no limit.
const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);

/// The objects that are waited for, by namespace and name, each with its uid; a name that is not there
/// has none.
type Pending = BTreeMap<(String, String), String>;

pub(super) async fn wait(args: &WaitArgs, out: &mut dyn Write) -> Result<(), Error> {
    let selected = kinds::select(&args.kind, &args.names)?;
    let by_content = args.all || !args.selection.is_empty();
    for (_, names) in &selected {
        match (by_content, names.is_empty()) {
            (true, false) => {
                return Err(Error::Usage("name cannot be provided when a selector is specified"));
            }
            (false, true) => return Err(Error::Usage("resource name or --all or --selector is required")),
            (true, true) | (false, false) => {}
        }
    }
    let span = match args.timeout {
        Span::Positive(span) => span,
        Span::Negative => WEEK,
    };
    let mut kubelet = client::connect(&args.root).await?;
    let deadline = Instant::now() + span;
    let mut failures = Failures::default();
    let mut targets = Vec::new();
    for (kind, names) in selected {
        let pending = if by_content {
            found(client::select(&mut kubelet, kind, &args.scope, &args.selection).await?)
        } else {
            named(&mut kubelet, args, kind, names, &mut failures).await?
        };
        targets.push((kind, pending));
    }
    if by_content && args.what != WaitFor::Delete && targets.iter().all(|(_, pending)| pending.is_empty()) {
        return Err(Error::Usage("no matching resources found"));
    }
    for (kind, pending) in targets.into_iter().filter(|(_, pending)| !pending.is_empty()) {
        let mut waiting = Waiting { args, kind, pending, deadline };
        waiting.run(&mut kubelet, out).await?;
        waiting.pending.into_keys().try_for_each(|(_, name)| {
            let subject = kinds::subject(kind, &name);
            failures.add(if span.is_zero() { Error::NotMet { subject } } else { Error::TimedOut { subject } })
        })?;
    }
    failures.result()
}

fn found(objects: Vec<Value>) -> Pending {
    objects.iter().map(|object| (watch::key(object), uid(object))).collect()
}

fn uid(object: &Value) -> String {
    object["metadata"]["uid"].as_str().unwrap_or_default().to_owned()
}

/// What is not there is an error, unless that is waited for.
async fn named(
    kubelet: &mut KubeletClient<Channel>,
    args: &WaitArgs,
    kind: Kind,
    names: Vec<String>,
    failures: &mut Failures,
) -> Result<Pending, Error> {
    let mut pending = Pending::new();
    for name in names {
        match client::get::<Value>(kubelet, kind, args.scope.namespace(), &name).await {
            Ok(objects) => pending.extend(found(objects)),
            Err(Error::Refused(status)) if status.code() == Code::NotFound => match args.what {
                WaitFor::Delete => {}
                WaitFor::Create => {
                    let namespace =
                        if kind.is_namespaced() { args.scope.namespace().to_owned() } else { String::new() };
                    pending.insert((namespace, name), String::new());
                }
                WaitFor::Condition { .. } | WaitFor::Field { .. } => failures.add(Error::Refused(status))?,
            },
            Err(error) => return Err(error),
        }
    }
    Ok(pending)
}

/// The objects of one kind.
struct Waiting<'a> {
    args: &'a WaitArgs,
    kind: Kind,
    pending: Pending,
    deadline: Instant,
}

impl Waiting<'_> {
    /// Returns when no object is pending, or the time is over.
    async fn run(&mut self, kubelet: &mut KubeletClient<Channel>, out: &mut dyn Write) -> Result<(), Error> {
        let Self { args, kind, ref mut pending, deadline } = *self;
        let whole = matches!(args.what, WaitFor::Field { .. });
        let mut watch = Watch::open(kubelet, kind, args.scope.wanted(), "", whole).await?;
        let looks_once = args.timeout == Span::Positive(Duration::ZERO);
        let waits_for_end = args.what == WaitFor::Delete;
        let mut is_listing = true;
        let mut seen = Vec::new();
        while !pending.is_empty() {
            let next =
                if is_listing { Ok(watch.next().await) } else { timeout_at(deadline, watch.next()).await };
            let Ok(next) = next else { break };
            let (event, object) = next?.ok_or(Error::KubeletEnds)?;
            let key = watch::key(&object);
            let is_met = match event {
                Type::Bookmark => {
                    is_listing = false;
                    // What went before the list began is not in it.
                    if waits_for_end {
                        let is_gone = |key: &(String, String)| !seen.contains(key);
                        for key in pending.keys().filter(|key| is_gone(key)).cloned().collect::<Vec<_>>() {
                            pending.remove(&key);
                            met(kind, &key.1, out)?;
                        }
                    }
                    if looks_once {
                        break;
                    }
                    continue;
                }
                Type::Added | Type::Modified => {
                    let Some(known) = pending.get(&key) else { continue };
                    if waits_for_end && is_listing && *known == uid(&object) {
                        seen.push(key.clone());
                    }
                    is_met(&args.what, &object)?
                }
                Type::Deleted => waits_for_end && pending.get(&key) == Some(&uid(&object)),
            };
            if is_met && pending.remove(&key).is_some() {
                met(kind, &key.1, out)?;
            }
        }
        Ok(())
    }
}

fn met(kind: Kind, name: &str, out: &mut dyn Write) -> Result<(), Error> {
    writeln!(out, "{}/{name} condition met", kinds::resource(kind))
        .and_then(|()| out.flush())
        .map_err(Error::Output)
}

fn is_met(what: &WaitFor, object: &Value) -> Result<bool, Error> {
    match what {
        WaitFor::Create => Ok(true),
        WaitFor::Delete => Ok(false),
        WaitFor::Condition { name, value } => {
            let conditions = object["status"]["conditions"].as_array();
            let mut conditions = conditions.into_iter().flatten();
            let text =
                |condition: &Value, field: &str| condition[field].as_str().unwrap_or_default().to_owned();
            let condition = conditions.find(|one| text(one, "type").eq_ignore_ascii_case(name));
            let is_met = |one: &Value| text(one, "status").eq_ignore_ascii_case(value);
            Ok(condition.is_some_and(|one| !is_of_earlier_generation(one, object) && is_met(one)))
        }
        WaitFor::Field { path, value } => {
            // A list that is still too short is no error while waiting.
            let found = match path.0.find(object) {
                Err(jsonpath::Error::OutOfBounds { .. }) => Vec::new(),
                found => found.map_err(Error::Template)?,
            };
            match (found.as_slice(), value) {
                ([], _) => Ok(false),
                ([one], Some(value)) => Ok(jsonpath::text(one) == *value),
                ([_], None) => Ok(true),
                _ => Err(Error::Usage("given jsonpath expression matches more than one value")),
            }
        }
    }
}

/// Whether the condition was written before the object's last change was seen.
fn is_of_earlier_generation(condition: &Value, object: &Value) -> bool {
    let observed =
        condition["observedGeneration"].as_u64().or(object["status"]["observedGeneration"].as_u64());
    observed
        .is_some_and(|observed| object["metadata"]["generation"].as_u64().is_some_and(|now| observed < now))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn conditions_and_fields_are_compared_with_the_object() {
        let pod = json!({"status": {"phase": "Running", "containerStatuses": [],
            "conditions": [{"type": "Ready", "status": "True"}, {"type": "Disrupted", "status": "False"}]}});
        for (what, expected) in [
            ("condition=Ready", true),
            ("condition=ready=TRUE", true),
            ("condition=Disrupted", false),
            ("condition=Disrupted=false", true),
            ("condition=Other=False", false),
            ("jsonpath={.status.phase}=Running", true),
            ("jsonpath={.status.phase}=Pending", false),
            ("jsonpath={.status.phase}", true),
            ("jsonpath={.status.podIP}", false),
            ("jsonpath={.status.containerStatuses[0].ready}=true", false),
            ("create", true),
            ("delete", false),
        ] {
            assert_eq!(is_met(&what.parse().unwrap(), &pod).unwrap(), expected, "{what}");
        }
        is_met(&"jsonpath={.status.conditions[*].type}=Ready".parse().unwrap(), &pod).unwrap_err();
    }
}
