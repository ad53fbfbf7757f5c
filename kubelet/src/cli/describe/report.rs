//! Text in `describe`'s format: `Key:   value`, indented by two spaces per level.

use std::collections::BTreeMap;
use std::fmt::Display;

use super::Table;
use crate::cli::printable::{printable, printable_line};
use crate::objects::Time;

/// The values of one level are aligned.
fn value_column(level: usize) -> usize {
    18 + 2 * level
}

#[derive(Debug, Default)]
pub(super) struct Report {
    text: String,
}

impl Report {
    pub(super) fn field(&mut self, level: usize, key: &str, value: &str) {
        let value = if value.is_empty() { "<none>" } else { value };
        self.line(level, key, value);
    }

    /// A key whose value is on the lines below it.
    pub(super) fn title(&mut self, level: usize, key: &str) {
        self.text.push_str(&format!("{}{key}:\n", "  ".repeat(level)));
    }

    pub(super) fn plain(&mut self, level: usize, line: &str) {
        let line = printable_line(line);
        self.text.push_str(&format!("{}{line}\n", "  ".repeat(level)));
    }

    /// One line for each entry; the key is on the first.
    pub(super) fn map<V: Display>(&mut self, level: usize, key: &str, map: &BTreeMap<String, V>, sign: &str) {
        if map.is_empty() {
            return self.field(level, key, "");
        }
        for (at, (name, value)) in map.iter().enumerate() {
            let entry = format!("{name}{sign}{value}");
            if at == 0 {
                self.line(level, key, &entry);
            } else {
                let entry = printable_line(&entry);
                self.text.push_str(&format!("{:width$}{entry}\n", "", width = value_column(level)));
            }
        }
    }

    /// A list below its key; nothing if it is empty.
    pub(super) fn list(&mut self, level: usize, key: &str, items: &[String]) {
        if items.is_empty() {
            return;
        }
        self.title(level, key);
        for item in items {
            self.plain(level + 1, item);
        }
    }

    pub(super) fn table(&mut self, level: usize, mut table: Table) {
        let mut text = Vec::new();
        table.flush(&mut text).expect("writing to memory");
        for line in String::from_utf8_lossy(&text).lines() {
            self.plain(level, line.trim_end());
        }
    }

    pub(super) fn into_text(self) -> String {
        self.text
    }

    fn line(&mut self, level: usize, key: &str, value: &str) {
        let head = format!("{}{key}:", "  ".repeat(level));
        // Keep two spaces between a long key and its value.
        let width = value_column(level).max(head.len() + 2);
        // Indent further lines of the value, so that none looks like a key.
        let value = printable(value).replace('\n', &format!("\n{:width$}", ""));
        self.text.push_str(&format!("{head:<width$}{value}\n"));
    }
}

/// `Fri, 20 Nov 2026 20:25:27 +0000`.
pub(super) fn moment(time: Option<Time>) -> String {
    time.map(|time| time.strftime("%a, %d %b %Y %H:%M:%S +0000").to_string()).unwrap_or_default()
}
