//! `events`.

use std::io::{self, Write};

use proto::kubelet::watch_event::Type;
use serde::Deserialize;
use serde_json::Value;

use super::printer::{self, Printer};
use super::table::Table;
use super::tables::Style;
use super::watch::Watch;
use super::{Error, age, client, kinds};
use crate::config::{EventsArgs, OutputFormat};
use crate::objects::{Event, Kind, now};

pub(super) async fn events(args: &EventsArgs, out: &mut dyn Write) -> Result<(), Error> {
    let subject = args.subject.as_deref().map(Subject::parse).transpose()?;
    let mut kubelet = client::connect(&args.root).await?;
    let mut watch = Watch::open(&mut kubelet, Kind::Event, args.scope.wanted(), "", false).await?;
    let wanted = |event: &Value| {
        let is_of_type =
            |wanted: &String| event["type"].as_str().is_some_and(|found| found.eq_ignore_ascii_case(wanted));
        (args.types.is_empty() || args.types.iter().any(is_of_type))
            && subject.as_ref().is_none_or(|subject| subject.matches(event))
    };
    let mut listed = Vec::new();
    while let Some((step, event)) = watch.next().await? {
        match step {
            Type::Bookmark => break,
            _ if wanted(&event) => listed.push(event),
            _ => {}
        }
    }
    // RFC 3339 in UTC, to the second: the order of the texts is that of the times.
    listed.sort_by(|one, other| {
        let time = |event: &Value| event["lastTimestamp"].as_str().map(str::to_owned);
        time(one).cmp(&time(other))
    });
    let mut output = Output::new(args);
    if listed.is_empty() && !args.watch && args.output.is_none() {
        let place = if args.scope.all_namespaces { ".".to_owned() } else { args.scope.place(true) };
        return writeln!(io::stderr(), "No events found{place}").map_err(Error::Output);
    }
    match &args.output {
        Some(format) if printer::is_document(Some(format)) && !args.watch => {
            return printer::write_document(&printer::list(listed), format, out);
        }
        _ => output.write(&listed, out)?,
    }
    if args.watch {
        while let Some((step, event)) = watch.next().await? {
            if step != Type::Deleted && wanted(&event) {
                output.write(&[event], out)?;
            }
        }
    }
    Ok(())
}

/// `KIND/NAME`.
struct Subject {
    kind: Kind,
    name: String,
}

impl Subject {
    fn parse(text: &str) -> Result<Self, Error> {
        let wrong = Error::Usage("--for must be in resource/name form");
        let (kind, name) = text.split_once('/').ok_or(wrong)?;
        Ok(Self { kind: kinds::parse(kind)?, name: name.to_owned() })
    }

    fn matches(&self, event: &Value) -> bool {
        let object = &event["involvedObject"];
        object["kind"].as_str() == Some(self.kind.as_str()) && object["name"].as_str() == Some(&self.name)
    }
}

enum Output<'a> {
    /// The columns of kubectl's `events`, which are not those of its `get events`.
    Table {
        table: Table,
        has_namespaces: bool,
    },
    Other(Printer<'a>),
}

impl<'a> Output<'a> {
    fn new(args: &'a EventsArgs) -> Self {
        let has_namespaces = args.scope.all_namespaces;
        if let Some(format) = &args.output
            && *format != OutputFormat::Wide
        {
            let style = Style {
                wide: false,
                has_namespaces,
                has_kinds: false,
                label_columns: &[],
                has_labels: false,
            };
            return Self::Other(Printer::new(Kind::Event, Some(format), style, !args.no_headers));
        }
        let namespace = if has_namespaces { &["NAMESPACE"][..] } else { &[] };
        let head = [namespace, &["LAST SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE"]].concat();
        let head = head.into_iter().map(str::to_owned).collect();
        Self::Table { table: Table::new((!args.no_headers).then_some(head)), has_namespaces }
    }

    fn write(&mut self, events: &[Value], out: &mut dyn Write) -> Result<(), Error> {
        match self {
            Self::Other(printer) => {
                events.iter().try_for_each(|event| printer.add(event, out))?;
                printer.flush(out)
            }
            Self::Table { table, has_namespaces } => {
                for event in events {
                    let event = Event::deserialize(event).map_err(Error::Answer)?;
                    let mut row = vec![
                        age::of_event(&event, now()),
                        event.event_type.as_str().to_owned(),
                        event.reason,
                        format!("{}/{}", event.involved_object.kind, event.involved_object.name),
                        event.message.trim().to_owned(),
                    ];
                    if *has_namespaces {
                        row.insert(0, event.metadata.namespace);
                    }
                    table.push(row);
                }
                table.flush(out).and_then(|()| out.flush()).map_err(Error::Output)
            }
        }
    }
}
