//! `describe node`: conditions, capacity, and the pods that take part of it.

use std::collections::BTreeMap;

use serde_json::Value;

use super::report::Report;
use super::{Subject, Table};
use crate::cli::age;
use crate::objects::{Event, Kind, Pod, Quantity, Time};
use crate::resources::{self, Amounts};

const RESOURCES: [&str; 3] = ["cpu", "memory", "ephemeral-storage"];

pub(super) fn describe(node: &Value, pods: &[Pod], events: &[Event], now: Time) -> String {
    let name = text(&node["metadata"]["name"]);
    let status = &node["status"];
    let mut report = Report::default();
    report.field(0, "Name", name);
    describe_conditions(&status["conditions"], &mut report);
    describe_addresses(&status["addresses"], &mut report);
    for (title, amounts) in [("Capacity", "capacity"), ("Allocatable", "allocatable")] {
        let amounts: BTreeMap<String, String> =
            serde_json::from_value(status[amounts].clone()).unwrap_or_default();
        report.title(0, title);
        let mut table = Table::new(None);
        amounts.into_iter().for_each(|(resource, amount)| table.push(vec![format!("{resource}:"), amount]));
        report.table(1, table);
    }
    report.title(0, "System Info");
    report.field(1, "Kubelet Version", text(&status["nodeInfo"]["kubeletVersion"]));
    // The others' requests are free again.
    let running: Vec<&Pod> = pods.iter().filter(|pod| !pod.status.phase.has_ended()).collect();
    describe_pods(&running, now, &mut report);
    describe_allocated(&running, &status["allocatable"], &mut report);
    let subject = Subject { kind: Kind::Node, namespace: "", name, uid: "" };
    super::describe_events(&subject, events, now, &mut report);
    report.into_text()
}

fn describe_conditions(conditions: &Value, report: &mut Report) {
    let Some(conditions) = conditions.as_array() else { return };
    report.title(0, "Conditions");
    let mut table = Table::with_head(["Type", "Status", "Reason", "Message"]);
    for condition in conditions {
        let fields = ["type", "status", "reason", "message"];
        table.push(fields.map(|field| text(&condition[field]).to_owned()).to_vec());
    }
    report.table(1, table);
}

fn describe_addresses(addresses: &Value, report: &mut Report) {
    let Some(addresses) = addresses.as_array() else { return };
    report.title(0, "Addresses");
    for address in addresses {
        report.field(1, text(&address["type"]), text(&address["address"]));
    }
}

fn describe_pods(pods: &[&Pod], now: Time, report: &mut Report) {
    report.title(0, &format!("Non-terminated Pods ({} in total)", pods.len()));
    let head = ["Namespace", "Name", "CPU Requests", "CPU Limits", "Memory Requests", "Memory Limits", "Age"];
    let mut table = Table::with_head(head);
    for pod in pods {
        let meta = &pod.metadata;
        let [cpu, memory, _] = amounts(resources::requests(pod));
        let [cpu_limit, memory_limit, _] = amounts(resources::limits(pod));
        let age = age::since(meta.creation_timestamp, now);
        table.push(vec![
            meta.namespace.clone(),
            meta.name.clone(),
            cpu,
            cpu_limit,
            memory,
            memory_limit,
            age,
        ]);
    }
    report.table(1, table);
}

fn describe_allocated(pods: &[&Pod], allocatable: &Value, report: &mut Report) {
    let requests = amounts(sum(pods, resources::requests));
    let limits = amounts(sum(pods, resources::limits));
    report.title(0, "Allocated resources");
    let mut table = Table::with_head(["Resource", "Requests", "Limits"]);
    for ((resource, requested), limit) in RESOURCES.into_iter().zip(requests).zip(limits) {
        let share = |amount: &str| format!("{amount} ({}%)", percent(amount, text(&allocatable[resource])));
        table.push(vec![resource.to_owned(), share(&requested), share(&limit)]);
    }
    report.table(1, table);
}

fn sum(pods: &[&Pod], of: fn(&Pod) -> Amounts) -> Amounts {
    pods.iter().map(|pod| of(pod)).fold(Amounts::default(), |sum, more| Amounts {
        cpu_millis: sum.cpu_millis.saturating_add(more.cpu_millis),
        memory_bytes: sum.memory_bytes.saturating_add(more.memory_bytes),
        storage_bytes: sum.storage_bytes.saturating_add(more.storage_bytes),
    })
}

/// Rounded down, as kubectl does. What the node has none of counts 0.
fn percent(amount: &str, of: &str) -> u64 {
    let millis = |amount: &str| amount.parse().as_ref().map_or(0, Quantity::milli_value);
    millis(amount).saturating_mul(100).checked_div(millis(of)).unwrap_or(0)
}

/// In the order of `RESOURCES`.
fn amounts(amounts: Amounts) -> [String; 3] {
    let Amounts { cpu_millis, memory_bytes, storage_bytes } = amounts;
    let of_bytes = |bytes: i64| Quantity::from_bytes(bytes.unsigned_abs()).to_string();
    let cpu = if cpu_millis % 1000 == 0 { (cpu_millis / 1000).to_string() } else { format!("{cpu_millis}m") };
    [cpu, of_bytes(memory_bytes), of_bytes(storage_bytes)]
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
