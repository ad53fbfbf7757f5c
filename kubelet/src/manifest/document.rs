//! The documents of a text, each with its place in it.

use std::rc::Rc;

use serde::de::DeserializeOwned;

use super::limits::{DOCUMENT_BYTES, Deadline};
use super::path::FieldPath;
use super::read::{self, Located, Unknown};
use super::scalar::Scalar;
use super::tree::{self, Node, Position, Value};
use super::{ManifestError, Place};
use crate::objects::Kind;

/// A message quotes what it found, and what it found may be megabytes.
const MESSAGE_BYTES: usize = 1024;
/// A valid name is not longer (RFC 1123).
const NAME_BYTES: usize = 253;

/// The text of one document.
#[derive(Debug)]
pub(super) struct Section<'a> {
    text: &'a str,
    /// So many lines stand before it.
    lines_before: usize,
    /// Its first line that says something, from 1 within the file.
    line: usize,
}

/// Cuts `text` at the lines that YAML reserves for it (`---` in the first
/// column, which no scalar may contain), so that a syntax error ends with its
/// document. Documents of blanks and comments only are left out. At most
/// `limit` sections are made.
pub(super) fn split(text: &str, limit: usize) -> Vec<Section<'_>> {
    let mut sections = Vec::new();
    let (mut start, mut start_line) = (0, 0);
    let mut offset = 0;
    for (at, line) in text.split_inclusive('\n').enumerate() {
        if is_marker(line) && offset > start {
            sections.extend(Section::new(&text[start..offset], start_line));
            (start, start_line) = (offset, at);
            if sections.len() == limit {
                return sections;
            }
        }
        offset += line.len();
    }
    sections.extend(Section::new(&text[start..], start_line));
    sections
}

fn is_marker(line: &str) -> bool {
    line.strip_prefix("---").is_some_and(|rest| rest.is_empty() || rest.starts_with(char::is_whitespace))
}

impl<'a> Section<'a> {
    fn new(text: &'a str, lines_before: usize) -> Option<Self> {
        let first = text.lines().position(says_something)?;
        Some(Self { text, lines_before, line: lines_before + first + 1 })
    }

    pub(super) fn line(&self) -> usize {
        self.line
    }
}

/// Neither blank nor comment nor a bare document mark.
fn says_something(line: &str) -> bool {
    let line = if is_marker(line) { &line[3..] } else { line };
    let line = line.trim();
    !(line.is_empty() || line.starts_with('#') || line == "...")
}

/// One document, read.
#[derive(Debug)]
pub(super) struct Document<'a> {
    file: &'a str,
    lines_before: usize,
    line: usize,
    root: Rc<Node<'a>>,
}

impl<'a> Document<'a> {
    pub(super) fn read(
        section: &Section<'a>,
        file: &'a str,
        deadline: Deadline,
    ) -> Result<Self, ManifestError> {
        let bytes = section.text.len();
        if bytes > DOCUMENT_BYTES {
            return Err(ManifestError {
                place: Place { file: file.to_owned(), line: section.line, column: 1 },
                object: None,
                message: format!("the document has {bytes} bytes: at most {DOCUMENT_BYTES} (3 MiB) are read"),
            });
        }
        match tree::build(section.text, deadline) {
            Ok(root) => Ok(Self { file, lines_before: section.lines_before, line: section.line, root }),
            Err(fault) => Err(ManifestError {
                place: place(file, section.lines_before, fault.at),
                object: None,
                message: clipped(fault.message),
            }),
        }
    }

    pub(super) fn line(&self) -> usize {
        self.line
    }

    /// A part of it, which is read like a document.
    pub(super) fn part(&self, root: Rc<Node<'a>>) -> Self {
        Self { line: self.lines_before + root.at.line, root, ..*self }
    }

    pub(super) fn root(&self) -> &Node<'a> {
        &self.root
    }

    /// The text of a field; `None` where it is missing or no text.
    pub(super) fn text(&self, field: &FieldPath) -> Option<&str> {
        let node = field.segments().iter().try_fold(&*self.root, |node, segment| node.get(segment))?;
        match &node.value {
            Value::Scalar(Scalar::Text(text)) => Some(text),
            Value::Scalar(_) | Value::Sequence(_) | Value::Mapping(_) => None,
        }
    }

    /// The object, and the fields that its type does not have.
    pub(super) fn object<T: DeserializeOwned>(&self) -> Result<(T, Vec<Unknown<'_>>), ManifestError> {
        read::object(&self.root).map_err(|error| {
            let kind = self.text(&FieldPath::root().key("kind"));
            let Located { at, field, message } = error.located(kind == Some(Kind::Secret.as_str()));
            let message = if field.is_root() { message } else { format!("{field}: {message}") };
            ManifestError {
                place: at.map_or_else(|| self.place(&field), |at| self.at(at)),
                object: Some(self.title()),
                message: clipped(message),
            }
        })
    }

    /// The object's kind and name: `Pod "web"`. The kind alone if the name is no text.
    pub(super) fn title(&self) -> String {
        let kind = self.text(&FieldPath::root().key("kind")).unwrap_or_default();
        match self.text(&FieldPath::root().key("metadata").key("name")) {
            Some(name) => format!("{kind} {:?}", clipped_to(NAME_BYTES, name.to_owned())),
            None => kind.to_owned(),
        }
    }

    pub(super) fn error_at(&self, field: &FieldPath, object: Option<&str>, message: &str) -> ManifestError {
        ManifestError {
            place: self.place(field),
            object: object.map(str::to_owned),
            message: clipped(format!("{field}: {message}")),
        }
    }

    /// Where a field stands; the nearest enclosing one if it is missing.
    pub(super) fn place(&self, field: &FieldPath) -> Place {
        let mut node = &*self.root;
        for segment in field.segments() {
            let Some(inner) = node.get(segment) else { break };
            node = inner;
        }
        self.at(node.at)
    }

    pub(super) fn at(&self, position: Position) -> Place {
        place(self.file, self.lines_before, position)
    }
}

fn place(file: &str, lines_before: usize, position: Position) -> Place {
    Place { file: file.to_owned(), line: lines_before + position.line, column: position.column }
}

pub(super) fn clipped(message: String) -> String {
    clipped_to(MESSAGE_BYTES, message)
}

fn clipped_to(bytes: usize, mut text: String) -> String {
    if text.len() > bytes {
        text.truncate(text.floor_char_boundary(bytes));
        text.push_str(" …");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_cut_at_their_marks_and_know_their_lines() {
        let text = "# a comment\n---\n\na: 1\n---\n# nothing\n--- {b: 2}\n---\ntext: |\n  --- not a mark\n";
        let lines: Vec<usize> = split(text, 9).iter().map(Section::line).collect();
        assert_eq!(lines, [4, 7, 9]);
        assert_eq!(split(text, 2).len(), 2);
    }
}
