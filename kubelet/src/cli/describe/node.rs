//! `describe node`: conditions, capacity, and the pods that take part of it.

use std::collections::BTreeMap;

use serde_json::Value;

use super::report::Report;
use super::{Subject, Table};
use crate::cli::age;
use crate::objects::{Event, Kind, Pod, Quantity, Time};
use crate::pod::resources::{self, Amounts};

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
    let requests = sum(pods, resources::requests);
    let limits = sum(pods, resources::limits);
    report.title(0, "Allocated resources");
    let mut table = Table::with_head(["Resource", "Requests", "Limits"]);
    for (index, resource) in RESOURCES.into_iter().enumerate() {
        let all = allocatable_of(allocatable, resource);
        let share = |of: Amounts| format!("{} ({}%)", amounts(of)[index], percent(raw(of)[index], all));
        table.push(vec![resource.to_owned(), share(requests), share(limits)]);
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

/// In the unit of `raw`.
fn allocatable_of(allocatable: &Value, resource: &str) -> u64 {
    let amount = text(&allocatable[resource]).parse();
    amount.as_ref().map_or(0, if resource == "cpu" { Quantity::milli_value } else { Quantity::value })
}

/// Rounded down, as kubectl does; 0 if the node has none.
fn percent(amount: i64, of: u64) -> u128 {
    (u128::from(amount.unsigned_abs()) * 100).checked_div(of.into()).unwrap_or(0)
}

/// In the order of `RESOURCES`: thousandths of processors, and bytes.
fn raw(amounts: Amounts) -> [i64; 3] {
    [amounts.cpu_millis, amounts.memory_bytes, amounts.storage_bytes]
}

/// In the order of `RESOURCES`.
fn amounts(amounts: Amounts) -> [String; 3] {
    let [cpu_millis, memory_bytes, storage_bytes] = raw(amounts);
    let of_bytes = |bytes: i64| Quantity::from_bytes(bytes.unsigned_abs()).to_string();
    let cpu = if cpu_millis % 1000 == 0 { (cpu_millis / 1000).to_string() } else { format!("{cpu_millis}m") };
    [cpu, of_bytes(memory_bytes), of_bytes(storage_bytes)]
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
