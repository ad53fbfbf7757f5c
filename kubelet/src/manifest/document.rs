//! The documents of a text, each with its place in it.

use serde::de::DeserializeOwned;

use super::locate::locate;
use super::path::FieldPath;
use super::{ManifestError, Place};

/// One YAML document.
#[derive(Debug)]
pub(super) struct Document<'a> {
    file: &'a str,
    text: &'a str,
    /// So many lines stand before it.
    lines_before: usize,
    /// Its first line that says something, from 1 within the file.
    line: usize,
}

/// Cuts `text` at the lines that YAML reserves for it (`---` in the first
/// column, which no scalar may contain), so that a syntax error ends with its
/// document. Documents of blanks and comments only are left out.
pub(super) fn split<'a>(text: &'a str, file: &'a str) -> Vec<Document<'a>> {
    let mut documents = Vec::new();
    let (mut start, mut start_line) = (0, 0);
    let mut offset = 0;
    for (at, line) in text.split_inclusive('\n').enumerate() {
        if is_marker(line) && offset > start {
            documents.extend(Document::new(file, &text[start..offset], start_line));
            (start, start_line) = (offset, at);
        }
        offset += line.len();
    }
    documents.extend(Document::new(file, &text[start..], start_line));
    documents
}

fn is_marker(line: &str) -> bool {
    line.strip_prefix("---").is_some_and(|rest| rest.is_empty() || rest.starts_with(char::is_whitespace))
}

impl<'a> Document<'a> {
    fn new(file: &'a str, text: &'a str, lines_before: usize) -> Option<Self> {
        let first = text.lines().position(says_something)?;
        Some(Self { file, text, lines_before, line: lines_before + first + 1 })
    }

    pub(super) fn line(&self) -> usize {
        self.line
    }

    pub(super) fn read<T: DeserializeOwned>(&self) -> Result<T, ManifestError> {
        T::deserialize(serde_yaml_ng::Deserializer::from_str(self.text)).map_err(|_| self.explain::<T>())
    }

    /// Also gives the fields that `T` does not have.
    pub(super) fn read_noting_unknown<T: DeserializeOwned>(
        &self,
    ) -> Result<(T, Vec<FieldPath>), ManifestError> {
        let mut unknown = Vec::new();
        let deserializer = serde_yaml_ng::Deserializer::from_str(self.text);
        let read = serde_ignored::deserialize(deserializer, |path| unknown.push(FieldPath::from(&path)));
        match read {
            Ok(object) => Ok((object, unknown)),
            Err(_) => Err(self.explain::<T>()),
        }
    }

    /// The value of a field; `None` where there is none.
    pub(super) fn value(&self, field: &FieldPath) -> Option<serde_yaml_ng::Value> {
        use super::path::Segment;
        let whole: serde_yaml_ng::Value = self.read().ok()?;
        let value = field.segments().iter().try_fold(&whole, |value, segment| match segment {
            Segment::Key(key) => value.get(key),
            Segment::Index(index) => value.get(index),
        });
        value.cloned()
    }

    pub(super) fn error_at(&self, field: &FieldPath, object: Option<&str>, message: &str) -> ManifestError {
        ManifestError {
            place: self.place(field),
            object: object.map(str::to_owned),
            message: format!("{field}: {message}"),
        }
    }

    /// Where a field stands; the nearest enclosing one if it is missing.
    pub(super) fn place(&self, field: &FieldPath) -> Place {
        match locate(self.text, field) {
            Some((line, column)) => self.at(self.lines_before + line, column),
            None => self.at(self.line, 1),
        }
    }

    /// Why the document is no `T`. Read once more with the lines before it as
    /// blanks: messages have their line numbers inside.
    fn explain<T: DeserializeOwned>(&self) -> ManifestError {
        let padded = format!("{}{}", "\n".repeat(self.lines_before), self.text);
        let Err(error) = T::deserialize(serde_yaml_ng::Deserializer::from_str(&padded)) else {
            return self.plain("not one document");
        };
        let Some(location) = error.location() else { return self.plain(&error.to_string()) };
        let text = error.to_string();
        let suffix = format!(" at line {} column {}", location.line(), location.column());
        let message = text.strip_suffix(&suffix).unwrap_or(&text).to_owned();
        ManifestError { place: self.at(location.line(), location.column()), object: None, message }
    }

    fn plain(&self, message: &str) -> ManifestError {
        ManifestError { place: self.at(self.line, 1), object: None, message: message.to_owned() }
    }

    fn at(&self, line: usize, column: usize) -> Place {
        Place { file: self.file.to_owned(), line, column }
    }
}

/// Neither blank nor comment nor a bare document mark.
fn says_something(line: &str) -> bool {
    let line = if is_marker(line) { &line[3..] } else { line };
    let line = line.trim();
    !(line.is_empty() || line.starts_with('#') || line == "...")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_cut_at_their_marks_and_know_their_lines() {
        let text = "# a comment\n---\n\na: 1\n---\n# nothing\n--- {b: 2}\n---\ntext: |\n  --- not a mark\n";
        let lines: Vec<usize> = split(text, "f").iter().map(Document::line).collect();
        assert_eq!(lines, [4, 7, 9]);
    }
}
