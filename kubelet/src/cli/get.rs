//! `get`: tables, YAML, JSON, names and templates, once or with each change.

use std::collections::BTreeSet;
use std::io::{self, Write};

use proto::kubelet::kubelet_client::KubeletClient;
use proto::kubelet::watch_event::Type;
use serde_json::Value;
use tonic::Code;
use tonic::transport::Channel;

use super::failures::Failures;
use super::printer::{self, Printer};
use super::tables::Style;
use super::watch::{self, Watch};
use super::{Error, client, kinds};
use crate::command_line::jsonpath::{self, Template};
use crate::config::{GetArgs, OutputFormat};
use crate::objects::Kind;

pub(super) async fn get(args: &GetArgs, out: &mut dyn Write) -> Result<(), Error> {
    let selected = kinds::select(&args.kind, &args.names)?;
    let has_names = selected.iter().any(|(_, names)| !names.is_empty());
    if has_names && args.scope.all_namespaces {
        return Err(Error::Usage("a resource cannot be retrieved by name across all namespaces"));
    }
    if has_names && !args.selection.is_empty() {
        return Err(Error::Usage("name cannot be provided when a selector is specified"));
    }
    for (kind, _) in &selected {
        client::check(&args.selection, *kind)?;
    }
    let kubelet = client::connect(&args.root).await?;
    let mut get = Get { args, kubelet, failures: Failures::default() };
    if args.watch || args.watch_only {
        return match selected.as_slice() {
            [(kind, names)] if names.len() < 2 => {
                get.follow(*kind, names.first().map_or("", String::as_str), out).await
            }
            [_] => Err(Error::Usage("you may only specify a single resource to watch")),
            _ => Err(Error::Usage("you may only specify a single resource type")),
        };
    }
    let is_single = matches!(selected.as_slice(), [(_, names)] if names.len() == 1);
    let mut found = Vec::new();
    for (kind, names) in selected {
        found.push((kind, get.fetch(kind, &names).await?));
    }
    if printer::is_document(args.output.as_ref()) {
        get.write_document(found, is_single, out)?;
    } else {
        get.write_rows(&found, out)?;
    }
    get.failures.result()
}

struct Get<'a> {
    args: &'a GetArgs,
    kubelet: KubeletClient<Channel>,
    failures: Failures,
}

impl Get<'_> {
    /// All objects of the kind if there are no names.
    async fn fetch(&mut self, kind: Kind, names: &[String]) -> Result<Vec<Value>, Error> {
        let args = self.args;
        let every = [String::new()];
        let mut objects = Vec::new();
        for name in if names.is_empty() { &every } else { names } {
            match self.fetch_named(kind, name).await {
                Ok(found) => {
                    objects.extend(found.into_iter().filter(|object| args.selection.matches(object)));
                }
                Err(Error::Refused(status)) if status.code() == Code::NotFound => {
                    if !args.ignore_not_found {
                        self.failures.add(Error::Refused(status))?;
                    }
                }
                Err(error) => return Err(error),
            }
        }
        if let Some(path) = &args.sort_by {
            let path = Template::relaxed(path).map_err(Error::Template)?;
            sort(&mut objects, &path)?;
        }
        Ok(objects)
    }

    /// All objects of the kind if the name is empty.
    async fn fetch_named(&mut self, kind: Kind, name: &str) -> Result<Vec<Value>, Error> {
        let namespace = self.args.scope.wanted();
        if self.has_whole_objects() {
            client::get_whole(&mut self.kubelet, kind, namespace, name).await
        } else {
            client::get::<Value>(&mut self.kubelet, kind, namespace, name).await
        }
    }

    /// Whether the output may show fields on which the kubelet does not act.
    fn has_whole_objects(&self) -> bool {
        let is_short = matches!(self.args.output, None | Some(OutputFormat::Wide | OutputFormat::Name));
        self.args.sort_by.is_some() || !is_short
    }

    fn write_document(
        &self,
        found: Vec<(Kind, Vec<Value>)>,
        is_single: bool,
        out: &mut dyn Write,
    ) -> Result<(), Error> {
        let Some(format) = &self.args.output else { return Ok(()) };
        let mut objects: Vec<Value> = found.into_iter().flat_map(|(_, objects)| objects).collect();
        if objects.is_empty() && (is_single || !self.failures.is_empty()) {
            return Ok(());
        }
        let whole = if is_single { objects.swap_remove(0) } else { printer::list(objects) };
        printer::write_document(&whole, format, out)
    }

    fn write_rows(&self, found: &[(Kind, Vec<Value>)], out: &mut dyn Write) -> Result<(), Error> {
        let args = self.args;
        let kinds: BTreeSet<Kind> = found.iter().map(|(kind, _)| *kind).collect();
        let style = self.style(kinds.len() > 1);
        let has_tables = matches!(args.output, None | Some(OutputFormat::Wide));
        let mut is_first = true;
        for (kind, objects) in found.iter().filter(|(_, objects)| !objects.is_empty()) {
            if has_tables && !std::mem::take(&mut is_first) {
                writeln!(out).map_err(Error::Output)?;
            }
            let mut printer = Printer::new(*kind, args.output.as_ref(), style, !args.no_headers);
            for object in objects {
                printer.add(object, out)?;
            }
            printer.flush(out)?;
        }
        let is_empty = found.iter().all(|(_, objects)| objects.is_empty()) && self.failures.is_empty();
        if is_empty && has_tables && !args.ignore_not_found {
            let place = args.scope.place(kinds.iter().any(|kind| kind.is_namespaced()));
            return writeln!(io::stderr(), "No resources found{place}").map_err(Error::Output);
        }
        Ok(())
    }

    fn style(&self, has_kinds: bool) -> Style<'_> {
        let args = self.args;
        Style {
            wide: args.output == Some(OutputFormat::Wide),
            has_namespaces: args.scope.all_namespaces,
            has_kinds: has_kinds || args.show_kind || args.kind == "all",
            label_columns: &args.label_columns,
            has_labels: args.show_labels,
        }
    }

    /// Prints the objects that there are, unless `--watch-only`, and each change of one.
    async fn follow(&mut self, kind: Kind, name: &str, out: &mut dyn Write) -> Result<(), Error> {
        let args = self.args;
        if !name.is_empty() {
            // An object that is not there is an error.
            self.fetch_named(kind, name).await?;
        }
        let (namespace, whole) = (args.scope.wanted(), self.has_whole_objects());
        let mut watch = Watch::open(&mut self.kubelet, kind, namespace, name, whole).await?;
        let mut printer = Printer::new(kind, args.output.as_ref(), self.style(false), !args.no_headers);
        let mut shown = BTreeSet::new();
        let mut is_listing = true;
        while let Some((event, object)) = watch.next().await? {
            if event == Type::Bookmark {
                is_listing = false;
                if !args.watch_only && !shown.is_empty() {
                    printer.flush(out)?;
                }
                continue;
            }
            let key = watch::key(&object);
            // An object that is not selected any more is as good as gone.
            let is_shown = match (args.selection.matches(&object), event) {
                (true, Type::Added | Type::Modified) => {
                    shown.insert(key);
                    true
                }
                (_, _) => shown.remove(&key),
            };
            if is_shown && !(is_listing && args.watch_only) {
                printer.add(&object, out)?;
                if !is_listing {
                    printer.flush(out)?;
                }
            }
        }
        Ok(())
    }
}

/// Numbers by their value, all else by its text; what is missing comes first.
fn sort(objects: &mut [Value], path: &Template) -> Result<(), Error> {
    for object in &*objects {
        path.find(object).map_err(Error::Template)?;
    }
    objects.sort_by(|one, other| {
        let value = |object| path.find(object).ok().and_then(|found| found.first().copied());
        let (one, other) = (value(one), value(other));
        let numbers = one.and_then(Value::as_f64).zip(other.and_then(Value::as_f64));
        match numbers {
            Some((one, other)) => one.total_cmp(&other),
            None => one.map(jsonpath::text).cmp(&other.map(jsonpath::text)),
        }
    });
    Ok(())
}
