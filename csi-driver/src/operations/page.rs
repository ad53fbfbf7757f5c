//! The Prometheus text format.

use std::fmt::{self, Write as _};

/// Writes one metric after the other, each with its HELP and TYPE lines.
#[derive(Debug, Default)]
pub(crate) struct Page(pub(crate) String);

impl Page {
    pub(crate) fn metric(&mut self, name: &str, kind: &str, help: &str) {
        self.line(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}"));
    }

    /// `labels` is the text between the braces; no label needs escaping.
    pub(crate) fn sample(&mut self, name: &str, labels: &str, value: impl fmt::Display) {
        match labels {
            "" => self.line(format_args!("{name} {value}")),
            labels => self.line(format_args!("{name}{{{labels}}} {value}")),
        }
    }

    fn line(&mut self, text: fmt::Arguments<'_>) {
        writeln!(self.0, "{text}").expect("a String takes any text");
    }
}
