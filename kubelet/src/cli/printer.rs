//! Objects in the format that `-o` asks for.

use std::io::{self, IsTerminal, Write};

use serde_json::{Value, json};

use super::printable::{printable, printable_json};
use super::table::Table;
use super::tables::{self, Style};
use super::{Error, kinds, yaml};
use crate::command_line::jsonpath;
use crate::config::OutputFormat;
use crate::objects::{Kind, now};

/// Writes objects of one kind, together or one after another.
#[derive(Debug)]
pub(super) struct Printer<'a> {
    kind: Kind,
    format: Option<&'a OutputFormat>,
    style: Style<'a>,
    table: Table,
    is_first: bool,
}

impl<'a> Printer<'a> {
    pub(super) fn new(
        kind: Kind,
        format: Option<&'a OutputFormat>,
        style: Style<'a>,
        has_header: bool,
    ) -> Self {
        let head = match format {
            None | Some(OutputFormat::Wide) => tables::head(kind, style),
            Some(OutputFormat::Columns(columns)) => {
                columns.iter().map(|column| column.header.clone()).collect()
            }
            Some(_) => Vec::new(),
        };
        let table = Table::new((has_header && !head.is_empty()).then_some(head));
        Self { kind, format, style, table, is_first: true }
    }

    /// A row of a table waits for [`Printer::flush`]; other formats do not.
    pub(super) fn add(&mut self, object: &Value, out: &mut dyn Write) -> Result<(), Error> {
        let is_first = std::mem::take(&mut self.is_first);
        match self.format {
            None | Some(OutputFormat::Wide) => {
                self.table.push(tables::row(self.kind, object, self.style, now())?);
            }
            Some(OutputFormat::Columns(columns)) => {
                let cell = |column: &crate::config::Column| {
                    let found = column.path.find(object).map_err(Error::Template)?;
                    let texts: Vec<String> = found.into_iter().map(jsonpath::text).collect();
                    Ok(if texts.is_empty() { "<none>".to_owned() } else { texts.join(",") })
                };
                self.table.push(columns.iter().map(cell).collect::<Result<_, Error>>()?);
            }
            Some(OutputFormat::Name) => {
                let name = object["metadata"]["name"].as_str().unwrap_or_default();
                writeln!(out, "{}/{name}", kinds::resource(self.kind)).map_err(Error::Output)?;
            }
            Some(format) => {
                if *format == OutputFormat::Yaml && !is_first {
                    writeln!(out, "---").map_err(Error::Output)?;
                }
                write_document(object, format, out)?;
            }
        }
        Ok(())
    }

    pub(super) fn flush(&mut self, out: &mut dyn Write) -> Result<(), Error> {
        self.table.flush(out).and_then(|()| out.flush()).map_err(Error::Output)
    }
}

/// Whether all objects are written as one document.
pub(super) fn is_document(format: Option<&OutputFormat>) -> bool {
    matches!(format, Some(OutputFormat::Yaml | OutputFormat::Json | OutputFormat::JsonPath(_)))
}

/// The List that kubectl makes of several objects.
pub(super) fn list(objects: Vec<Value>) -> Value {
    json!({"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": ""}, "items": objects})
}

pub(super) fn write_document(value: &Value, format: &OutputFormat, out: &mut dyn Write) -> Result<(), Error> {
    let text = match format {
        OutputFormat::Yaml => yaml::write(value),
        OutputFormat::JsonPath(template) => {
            let text = template.0.render(value).map_err(Error::Template)?;
            if io::stdout().is_terminal() { for_terminal(&text) } else { text }
        }
        _ => printable_json(&format!("{value:#}\n")).into_owned(),
    };
    out.write_all(text.as_bytes()).map_err(Error::Output)
}

/// Templates write texts of containers as they are; their own tabs stay.
fn for_terminal(text: &str) -> String {
    text.split('\t').map(printable).collect::<Vec<_>>().join("\t")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_gets_tabs_and_no_other_control_character() {
        assert_eq!(for_terminal("a\tb\n\u{1b}[2J"), "a\tb\n^[[2J");
    }
}
