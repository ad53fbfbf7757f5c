//! `-o`: the format of `get`.

use std::str::FromStr;

use crate::command_line::jsonpath::Template;

#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum OutputFormat {
    Wide,
    Yaml,
    Json,
    Name,
    JsonPath(Box<JsonPath>),
    /// A header and what stands below it, each.
    Columns(Vec<Column>),
}

/// A template, read.
#[derive(Debug, Clone, PartialEq)]
pub struct JsonPath(pub(crate) Template);

#[derive(Debug, Clone, PartialEq)]
pub struct Column {
    pub(crate) header: String,
    pub(crate) path: Template,
}

impl FromStr for OutputFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, argument) = match text.split_once('=') {
            Some((name, argument)) => (name, Some(argument)),
            None => (text, None),
        };
        match (name, argument) {
            ("wide", None) => Ok(Self::Wide),
            ("yaml", None) => Ok(Self::Yaml),
            ("json", None) => Ok(Self::Json),
            ("name", None) => Ok(Self::Name),
            ("jsonpath", Some(template)) => {
                let template = Template::parse(template).map_err(|e| e.to_string())?;
                Ok(Self::JsonPath(Box::new(JsonPath(template))))
            }
            ("custom-columns", Some(columns)) => {
                columns.split(',').map(column).collect::<Result<_, _>>().map(Self::Columns)
            }
            ("jsonpath" | "custom-columns", None) => Err(format!(
                "{name} needs a template: {name}={}",
                if name == "jsonpath" { "'{.metadata.name}'" } else { "NAME:.metadata.name" }
            )),
            _ => Err(format!(
                "unable to match a printer suitable for the output format {text:?}: want wide, yaml, json, name, jsonpath=TEMPLATE or custom-columns=HEADER:.path,..."
            )),
        }
    }
}

fn column(text: &str) -> Result<Column, String> {
    let (header, path) = text
        .split_once(':')
        .filter(|(header, path)| !header.is_empty() && !path.is_empty())
        .ok_or_else(|| format!("unexpected custom-columns spec: {text:?}, expected HEADER:PATH"))?;
    let path = Template::relaxed(path).map_err(|e| e.to_string())?;
    Ok(Column { header: header.to_owned(), path })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_read_with_their_templates() {
        assert_eq!("wide".parse(), Ok(OutputFormat::Wide));
        let columns: OutputFormat =
            "custom-columns=NAME:.metadata.name,NODE:{.spec.nodeName}".parse().unwrap();
        assert!(
            matches!(columns, OutputFormat::Columns(columns) if columns[1].header == "NODE" && columns.len() == 2)
        );
        for (text, problem) in [
            ("table", "unable to match a printer"),
            ("yaml=x", "unable to match a printer"),
            ("jsonpath", "jsonpath needs a template"),
            ("jsonpath={.a", "error parsing jsonpath {.a, unclosed action"),
            ("custom-columns=NAME", "expected HEADER:PATH"),
        ] {
            let error = text.parse::<OutputFormat>().unwrap_err();
            assert!(error.contains(problem), "{text}: {error}");
        }
    }
}
