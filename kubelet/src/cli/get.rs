//! `get`: tables, YAML, JSON, names.

use std::io::{self, Write};

use proto::kubelet::kubelet_client::KubeletClient;
use serde_json::{Value, json};
use tonic::transport::Channel;

use super::rows::{self, Tabular};
use super::table::Table;
use super::{Error, client, kinds, yaml};
use crate::config::{GetArgs, OutputFormat};
use crate::objects::{
    ConfigMap, CsiDriver, Event, Kind, PersistentVolume, PersistentVolumeClaim, Pod, Secret, StorageClass,
    now,
};

pub(super) async fn get(args: &GetArgs, out: &mut dyn Write) -> Result<(), Error> {
    let selected = kinds::select(&args.kind, &args.names)?;
    let mut kubelet = client::connect(&args.root).await?;
    let single = matches!(selected.as_slice(), [(_, names)] if names.len() == 1);
    let mut found = Vec::new();
    for (kind, names) in selected {
        let objects = fetch(&mut kubelet, args, kind, &names).await?;
        match args.output {
            Some(OutputFormat::Yaml | OutputFormat::Json) => found.extend(objects),
            Some(OutputFormat::Name) => write_names(kind, &objects, out).map_err(Error::Output)?,
            None | Some(OutputFormat::Wide) => write_table_of(kind, objects, args, out)?,
        }
    }
    match args.output {
        Some(format @ (OutputFormat::Yaml | OutputFormat::Json)) => {
            let whole = match (single, found.pop()) {
                (true, Some(only)) => only,
                (_, last) => {
                    found.extend(last);
                    json!({"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": ""}, "items": found})
                }
            };
            write_document(&whole, format, out)
        }
        None | Some(OutputFormat::Wide | OutputFormat::Name) => Ok(()),
    }
}

async fn fetch(
    kubelet: &mut KubeletClient<Channel>,
    args: &GetArgs,
    kind: Kind,
    names: &[String],
) -> Result<Vec<Value>, Error> {
    let namespace = if args.scope.all_namespaces { "" } else { &args.scope.namespace };
    if args.scope.all_namespaces && !names.is_empty() {
        return Err(Error::Usage("a resource cannot be retrieved by name across all namespaces"));
    }
    let every = [String::new()];
    let mut objects = Vec::new();
    for name in if names.is_empty() { &every } else { names } {
        objects.extend(match args.output {
            Some(OutputFormat::Yaml | OutputFormat::Json) => {
                client::get_whole(kubelet, kind, namespace, name).await?
            }
            None | Some(OutputFormat::Wide | OutputFormat::Name) => {
                client::get::<Value>(kubelet, kind, namespace, name).await?
            }
        });
    }
    Ok(objects)
}

fn write_document(value: &Value, format: OutputFormat, out: &mut dyn Write) -> Result<(), Error> {
    let text = match format {
        OutputFormat::Yaml => yaml::write(value),
        OutputFormat::Json | OutputFormat::Wide | OutputFormat::Name => format!("{value:#}\n"),
    };
    out.write_all(text.as_bytes()).map_err(Error::Output)
}

fn write_names(kind: Kind, objects: &[Value], out: &mut dyn Write) -> io::Result<()> {
    for object in objects {
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        writeln!(out, "{}/{name}", kinds::resource(kind))?;
    }
    Ok(())
}

fn write_table_of(kind: Kind, objects: Vec<Value>, args: &GetArgs, out: &mut dyn Write) -> Result<(), Error> {
    if objects.is_empty() {
        let scoped = kind.is_namespaced() && !args.scope.all_namespaces;
        let place = if scoped { format!(" in {} namespace.", args.scope.namespace) } else { String::new() };
        return writeln!(io::stderr(), "No resources found{place}").map_err(Error::Output);
    }
    match kind {
        Kind::Pod => write_table::<Pod>(objects, args, out),
        Kind::PersistentVolumeClaim => write_table::<PersistentVolumeClaim>(objects, args, out),
        Kind::PersistentVolume => write_table::<PersistentVolume>(objects, args, out),
        Kind::StorageClass => write_table::<StorageClass>(objects, args, out),
        Kind::CsiDriver => write_table::<CsiDriver>(objects, args, out),
        Kind::ConfigMap => write_table::<ConfigMap>(objects, args, out),
        Kind::Secret => write_table::<Secret>(objects, args, out),
        Kind::Event => write_table::<Event>(objects, args, out),
        Kind::Node => write_nodes(&objects, args, out),
    }
}

fn write_table<T: Tabular>(objects: Vec<Value>, args: &GetArgs, out: &mut dyn Write) -> Result<(), Error> {
    let (wide, namespaced) = (args.output == Some(OutputFormat::Wide), args.scope.all_namespaces);
    let mut table = Table::new((!args.no_headers).then(|| rows::head::<T>(wide, namespaced)));
    let now = now();
    for object in objects {
        let object: T = serde_json::from_value(object).map_err(Error::Answer)?;
        table.push(rows::row(&object, wide, namespaced, now));
    }
    table.write(out).map_err(Error::Output)
}

fn write_nodes(nodes: &[Value], args: &GetArgs, out: &mut dyn Write) -> Result<(), Error> {
    let head = ["NAME", "STATUS", "ROLES", "VERSION"].map(str::to_owned).to_vec();
    let mut table = Table::new((!args.no_headers).then_some(head));
    for node in nodes {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        table.push(vec![
            text(&node["metadata"]["name"]),
            text(&node["status"]["conditions"][0]["type"]),
            "<none>".to_owned(),
            text(&node["status"]["nodeInfo"]["kubeletVersion"]),
        ]);
    }
    table.write(out).map_err(Error::Output)
}
