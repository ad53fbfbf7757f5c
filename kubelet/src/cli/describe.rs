//! `describe`: one object in detail, with its events.

mod configuration;
mod node;
mod pod;
mod report;
mod snapshots;
mod sources;
mod storage;

use std::io::{self, Write};

use proto::kubelet::kubelet_client::KubeletClient;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tonic::transport::Channel;

use super::failures::Failures;
use super::table::Table;
use super::{Error, age, client, kinds};
use crate::config::DescribeArgs;
use crate::objects::{
    ConfigMap, CsiDriver, Event, Kind, Object, ObjectMeta, PersistentVolume, PersistentVolumeClaim, Pod,
    Secret, StorageClass, Time, VolumeSnapshot, VolumeSnapshotClass, VolumeSnapshotContent, now,
};
use report::Report;

/// A kind that `describe` supports.
trait Describe: Object {
    fn describe(&self, report: &mut Report);
}

pub(super) async fn describe(args: &DescribeArgs, out: &mut dyn Write) -> Result<(), Error> {
    let selected = kinds::select(&args.kind, &args.names)?;
    let mut kubelet = client::connect(&args.root).await?;
    let (mut printed, mut failures) = (0, Failures::default());
    for (kind, names) in selected {
        let texts = match kind {
            Kind::Pod => describe_kind::<Pod>(&mut kubelet, args, &names, &mut failures).await?,
            Kind::PersistentVolumeClaim => describe_claims(&mut kubelet, args, &names, &mut failures).await?,
            Kind::PersistentVolume => {
                describe_kind::<PersistentVolume>(&mut kubelet, args, &names, &mut failures).await?
            }
            Kind::StorageClass => {
                describe_kind::<StorageClass>(&mut kubelet, args, &names, &mut failures).await?
            }
            Kind::CsiDriver => describe_kind::<CsiDriver>(&mut kubelet, args, &names, &mut failures).await?,
            Kind::VolumeSnapshot => {
                describe_kind::<VolumeSnapshot>(&mut kubelet, args, &names, &mut failures).await?
            }
            Kind::VolumeSnapshotClass => {
                describe_kind::<VolumeSnapshotClass>(&mut kubelet, args, &names, &mut failures).await?
            }
            Kind::VolumeSnapshotContent => {
                describe_kind::<VolumeSnapshotContent>(&mut kubelet, args, &names, &mut failures).await?
            }
            Kind::ConfigMap => describe_kind::<ConfigMap>(&mut kubelet, args, &names, &mut failures).await?,
            Kind::Secret => describe_kind::<Secret>(&mut kubelet, args, &names, &mut failures).await?,
            Kind::Node => describe_nodes(&mut kubelet, args, &names, &mut failures).await?,
            Kind::Event => return Err(Error::Usage("describe does not support events: use get")),
        };
        for text in texts {
            let gap = if printed > 0 { "\n\n" } else { "" };
            write!(out, "{gap}{text}").map_err(Error::Output)?;
            printed += 1;
        }
        if printed == 0 && names.is_empty() {
            let place = args.scope.place(kind.is_namespaced());
            writeln!(io::stderr(), "No resources found{place}").map_err(Error::Output)?;
        }
    }
    failures.result()
}

async fn describe_kind<T: Describe>(
    kubelet: &mut KubeletClient<Channel>,
    args: &DescribeArgs,
    names: &[String],
    failures: &mut Failures,
) -> Result<Vec<String>, Error> {
    describe_each(kubelet, T::KIND, args, names, failures, describe_object::<T>).await
}

async fn describe_claims(
    kubelet: &mut KubeletClient<Channel>,
    args: &DescribeArgs,
    names: &[String],
    failures: &mut Failures,
) -> Result<Vec<String>, Error> {
    let pods: Vec<Pod> = client::get(kubelet, Kind::Pod, "", "").await?;
    let describe = |claim: &PersistentVolumeClaim, events: &[Event], now| {
        describe_with(claim, events, now, |report| storage::describe_users(claim, &pods, report))
    };
    describe_each(kubelet, Kind::PersistentVolumeClaim, args, names, failures, describe).await
}

async fn describe_nodes(
    kubelet: &mut KubeletClient<Channel>,
    args: &DescribeArgs,
    names: &[String],
    failures: &mut Failures,
) -> Result<Vec<String>, Error> {
    let pods: Vec<Pod> = client::get(kubelet, Kind::Pod, "", "").await?;
    let describe = |node: &Value, events: &[Event], now| node::describe(node, &pods, events, now);
    describe_each(kubelet, Kind::Node, args, names, failures, describe).await
}

/// Of the objects that the command line names or selects. Those that are not there do not keep the others from
/// being described.
async fn describe_each<T: DeserializeOwned>(
    kubelet: &mut KubeletClient<Channel>,
    kind: Kind,
    args: &DescribeArgs,
    names: &[String],
    failures: &mut Failures,
    describe: impl Fn(&T, &[Event], Time) -> String,
) -> Result<Vec<String>, Error> {
    let namespace = if args.scope.all_namespaces { "" } else { args.scope.namespace() };
    if !names.is_empty() && !args.selection.is_empty() {
        return Err(Error::Usage("name cannot be provided when a selector is specified"));
    }
    let mut objects: Vec<T> = Vec::new();
    if names.is_empty() {
        let selected = client::select(kubelet, kind, &args.scope, &args.selection).await?;
        let typed = selected.into_iter().map(|object| serde_json::from_value(object).map_err(Error::Answer));
        objects = typed.collect::<Result<_, _>>()?;
    }
    for name in names {
        match client::get::<T>(kubelet, kind, namespace, name).await {
            Ok(found) => objects.extend(found),
            Err(error @ Error::Refused(_)) => failures.add(error)?,
            Err(error) => return Err(error),
        }
    }
    let events: Vec<Event> = client::get(kubelet, Kind::Event, "", "").await?;
    let now = now();
    Ok(objects.iter().map(|object| describe(object, &events, now)).collect())
}

fn describe_object<T: Describe>(object: &T, events: &[Event], now: Time) -> String {
    describe_with(object, events, now, |_| {})
}

/// With more between what the object contains and its events.
fn describe_with<T: Describe>(
    object: &T,
    events: &[Event],
    now: Time,
    more: impl FnOnce(&mut Report),
) -> String {
    let mut report = Report::default();
    describe_metadata(object.metadata(), T::KIND, &mut report);
    object.describe(&mut report);
    more(&mut report);
    let ObjectMeta { namespace, name, uid, .. } = object.metadata();
    describe_events(&Subject { kind: T::KIND, namespace, name, uid }, events, now, &mut report);
    report.into_text()
}

/// The object of events.
struct Subject<'a> {
    kind: Kind,
    namespace: &'a str,
    name: &'a str,
    uid: &'a str,
}

fn describe_metadata(meta: &ObjectMeta, kind: Kind, report: &mut Report) {
    report.field(0, "Name", &meta.name);
    if kind.is_namespaced() {
        report.field(0, "Namespace", &meta.namespace);
    }
    report.map(0, "Labels", &meta.labels, "=");
    report.map(0, "Annotations", &meta.annotations, ": ");
    if let (Some(time), grace) = (meta.deletion_timestamp, meta.deletion_grace_period_seconds) {
        let grace = grace.map(|seconds| format!(" (grace period {seconds}s)")).unwrap_or_default();
        report.field(0, "Terminating", &format!("since {}{grace}", report::moment(Some(time))));
    }
}

fn describe_events(wanted: &Subject<'_>, events: &[Event], now: Time, report: &mut Report) {
    let own: Vec<&Event> = events
        .iter()
        .filter(|event| {
            let subject = &event.involved_object;
            subject.kind == wanted.kind.as_str()
                && subject.namespace == wanted.namespace
                && subject.name == wanted.name
                // An earlier object may have had the name.
                && (subject.uid == wanted.uid || subject.uid.is_empty())
        })
        .collect();
    if own.is_empty() {
        return report.field(0, "Events", "<none>");
    }
    report.title(0, "Events");
    let columns = ["Type", "Reason", "Age", "From", "Message"];
    let mut table = Table::with_head(columns);
    table.push(columns.map(|name| "-".repeat(name.len())).to_vec());
    for event in own {
        table.push(vec![
            event.event_type.as_str().to_owned(),
            event.reason.clone(),
            age::of_event(event, now),
            event.source.component.clone(),
            event.message.trim().to_owned(),
        ]);
    }
    report.table(1, table);
}
