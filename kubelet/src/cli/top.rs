//! `top`: what pods and the node use, from two looks at the counters.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::time::Duration;

use proto::kubelet::kubelet_client::KubeletClient;
use proto::kubelet::usage_response::Figures;
use proto::kubelet::{UsageRequest, UsageResponse};
use serde_json::Value;
use tonic::transport::Channel;

use super::table::Table;
use super::{Error, client, kinds, watch};
use crate::config::{Top, TopArgs};
use crate::objects::{Kind, Quantity};

/// Between the two looks.
const INTERVAL: Duration = Duration::from_millis(500);

pub(super) async fn top(args: &TopArgs, out: &mut dyn Write) -> Result<(), Error> {
    match args.kind {
        Top::Pod => pods(args, out).await,
        Top::Node => node(args, out).await,
    }
}

/// What something uses: thousandths of a processor, and bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Load {
    processor: u64,
    memory: u64,
}

impl Load {
    fn between(before: &Figures, after: &Figures) -> Self {
        let used = after.processor.saturating_sub(before.processor);
        let time = u64::try_from(after.time - before.time).unwrap_or(0);
        let processor = u128::from(used) * 1000 / u128::from(time.max(1));
        let processor = if time == 0 { 0 } else { u64::try_from(processor).unwrap_or(u64::MAX) };
        Self { processor, memory: after.working_set }
    }

    fn plus(self, other: Self) -> Self {
        Self { processor: self.processor + other.processor, memory: self.memory + other.memory }
    }

    /// `12m` and `3Mi`, as kubectl rounds them.
    fn cells(self) -> [String; 2] {
        [format!("{}m", self.processor), format!("{}Mi", self.memory >> 20)]
    }
}

async fn look(kubelet: &mut KubeletClient<Channel>) -> Result<UsageResponse, Error> {
    Ok(kubelet.usage(UsageRequest {}).await?.into_inner())
}

async fn look_twice(kubelet: &mut KubeletClient<Channel>) -> Result<(UsageResponse, UsageResponse), Error> {
    let before = look(kubelet).await?;
    tokio::time::sleep(INTERVAL).await;
    Ok((before, look(kubelet).await?))
}

async fn pods(args: &TopArgs, out: &mut dyn Write) -> Result<(), Error> {
    let mut kubelet = client::connect(&args.root).await?;
    let pods = match &args.name {
        Some(_) if !args.selection.is_empty() => {
            return Err(Error::Usage("only one of NAME or --selector can be provided"));
        }
        Some(name) => {
            client::get::<Value>(&mut kubelet, Kind::Pod, args.scope.namespace(), kinds::pod_name(name)?)
                .await?
        }
        None => client::select(&mut kubelet, Kind::Pod, &args.scope, &args.selection).await?,
    };
    let (before, after) = look_twice(&mut kubelet).await?;
    let loads = loads(&before, &after);
    let mut rows = Vec::new();
    for pod in &pods {
        let (namespace, name) = watch::key(pod);
        let Some(containers) = loads.get(pod["metadata"]["uid"].as_str().unwrap_or_default()) else {
            continue;
        };
        let namespace = args.scope.all_namespaces.then_some(namespace);
        let row = |container: Option<&str>, load: Load| {
            let names = namespace.iter().cloned().chain([name.clone()]).chain(container.map(str::to_owned));
            (load, names.chain(load.cells()).collect::<Vec<String>>())
        };
        if args.containers {
            rows.extend(containers.iter().map(|(container, load)| row(Some(*container), *load)));
        } else {
            rows.push(row(None, containers.values().copied().fold(Load::default(), Load::plus)));
        }
    }
    if rows.is_empty() {
        let message = format!("No resources found{}", args.scope.place(true));
        return writeln!(io::stderr(), "{message}").map_err(Error::Output);
    }
    match args.sort_by.as_deref() {
        Some("cpu") => rows.sort_by_key(|(load, _)| std::cmp::Reverse(load.processor)),
        Some(_memory) => rows.sort_by_key(|(load, _)| std::cmp::Reverse(load.memory)),
        None => {}
    }
    let namespace = if args.scope.all_namespaces { &["NAMESPACE"][..] } else { &[] };
    let names = if args.containers { &["POD", "NAME"][..] } else { &["NAME"] };
    let head = [namespace, names, &["CPU(cores)", "MEMORY(bytes)"]].concat();
    write_table(&head, args.no_headers, rows.into_iter().map(|(_, row)| row), out)
}

/// By pod and container; of those that ran at both times.
fn loads<'a>(before: &UsageResponse, after: &'a UsageResponse) -> BTreeMap<&'a str, BTreeMap<&'a str, Load>> {
    let mut loads: BTreeMap<&str, BTreeMap<&str, Load>> = BTreeMap::new();
    for container in &after.containers {
        let same =
            before.containers.iter().find(|one| one.pod == container.pod && one.name == container.name);
        let Some(now) = container.figures.as_ref() else { continue };
        let Some(then) = same.and_then(|same| same.figures.as_ref()) else { continue };
        loads.entry(&container.pod).or_default().insert(&container.name, Load::between(then, now));
    }
    loads
}

async fn node(args: &TopArgs, out: &mut dyn Write) -> Result<(), Error> {
    let mut kubelet = client::connect(&args.root).await?;
    let name = args.name.as_deref().unwrap_or_default();
    let nodes = client::get::<Value>(&mut kubelet, Kind::Node, "", name).await?;
    let (before, after) = look_twice(&mut kubelet).await?;
    let (before, after) = (before.node.unwrap_or_default(), after.node.unwrap_or_default());
    let load = Load::between(&before, &after);
    let [processor, memory] = load.cells();
    let rows = nodes.iter().map(|node| {
        let allocatable = &node["status"]["allocatable"];
        let quantity = |name: &str| allocatable[name].as_str().and_then(|text| text.parse::<Quantity>().ok());
        let processors = quantity("cpu").map_or(0, |cpu| cpu.value().saturating_mul(1000));
        let bytes = quantity("memory").map_or(0, |memory| memory.value());
        vec![
            watch::key(node).1,
            processor.clone(),
            percent(load.processor, processors),
            memory.clone(),
            percent(load.memory, bytes),
        ]
    });
    let head = ["NAME", "CPU(cores)", "CPU(%)", "MEMORY(bytes)", "MEMORY(%)"];
    write_table(&head, args.no_headers, rows, out)
}

fn percent(part: u64, whole: u64) -> String {
    let percent = (u128::from(part) * 100).checked_div(u128::from(whole));
    percent.map_or_else(|| "<unknown>".to_owned(), |percent| format!("{percent}%"))
}

fn write_table(
    head: &[&str],
    no_headers: bool,
    rows: impl Iterator<Item = Vec<String>>,
    out: &mut dyn Write,
) -> Result<(), Error> {
    let head = head.iter().map(|name| (*name).to_owned()).collect();
    let mut table = Table::new((!no_headers).then_some(head));
    rows.for_each(|row| table.push(row));
    table.flush(out).map_err(Error::Output)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_the_difference_of_two_looks() {
        let at = |processor, time| Figures { processor, time, working_set: 5 << 20 };
        let load = Load::between(&at(1_000_000, 0), &at(126_000_000, 500_000_000));
        assert_eq!(load.cells(), ["250m", "5Mi"]);
        // The runtime answered from the same sample; a container began anew.
        assert_eq!(Load::between(&at(7, 3), &at(9, 3)).processor, 0);
        assert_eq!(Load::between(&at(9, 3), &at(7, 5)).processor, 0);
        assert_eq!(percent(250, 2000), "12%");
        assert_eq!(percent(250, 0), "<unknown>");
    }
}
