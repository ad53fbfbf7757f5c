//! The tracing layer behind [`crate::init`].

use std::fmt;
use std::fs::File;
use std::io::Write;

use serde_json::{Map, Value};
use tracing::Subscriber;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use crate::{SpanLine, monotonic_ns};

/// Appends a [`SpanLine`] to a file for every span at INFO or above that closes.
#[derive(Debug)]
pub struct SpanLines {
    process: &'static str,
    file: File,
}

/// The data of an open span.
struct Open {
    start_ns: u64,
    fields: Map<String, Value>,
}

impl SpanLines {
    pub fn new(process: &'static str, file: File) -> Self {
        Self { process, file }
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for SpanLines {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        if *attributes.metadata().level() > tracing::Level::INFO {
            return;
        }
        let mut open = Open { start_ns: monotonic_ns(), fields: Map::new() };
        attributes.record(&mut Fields(&mut open.fields));
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(open);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(open) = span.extensions_mut().get_mut::<Open>()
        {
            values.record(&mut Fields(&mut open.fields));
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else { return };
        let Some(mut open) = span.extensions_mut().remove::<Open>() else { return };
        let name = match open.fields.remove("span") {
            Some(Value::String(name)) => name,
            _ => span.name().to_owned(),
        };
        let line = SpanLine {
            process: self.process.to_owned(),
            pid: std::process::id(),
            name,
            start_ns: open.start_ns,
            end_ns: monotonic_ns(),
            fields: open.fields,
        };
        let mut text = serde_json::to_vec(&line).expect("strings and numbers are always JSON");
        text.push(b'\n');
        // A failed write must not disturb the traced work.
        let _line_is_lost = (&self.file).write_all(&text);
    }
}

struct Fields<'a>(&'a mut Map<String, Value>);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.insert(field.name().to_owned(), Value::String(format!("{value:?}")));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), Value::String(value.to_owned()));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek};

    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[test]
    fn a_closed_span_is_one_line_with_its_fields_and_its_run_time_name() {
        let mut file = tempfile();
        let layer = SpanLines::new("test", file.try_clone().unwrap());
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            let span = tracing::info_span!(
                "cni",
                span = "cni.bridge.ADD",
                ifname = "eth0",
                code = tracing::field::Empty
            );
            span.record("code", 7_u64);
            drop(span);
            drop(tracing::debug_span!("too fine"));
        });
        file.rewind().unwrap();
        let mut text = String::new();
        file.read_to_string(&mut text).unwrap();
        let line: SpanLine = serde_json::from_str(text.trim_end()).unwrap();
        assert_eq!(line.name, "cni.bridge.ADD");
        assert_eq!(line.fields["ifname"], "eth0");
        assert_eq!(line.fields["code"], 7);
        assert!(line.end_ns >= line.start_ns);
    }

    fn tempfile() -> File {
        tempfile::tempfile().unwrap()
    }
}
