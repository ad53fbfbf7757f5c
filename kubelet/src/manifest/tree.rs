//! One document as a tree of values, each with its place in the text.
//!
//! The tree is built in one pass over the parser's events and answers every
//! later question (what is the value, where is it, is the field known), so that
//! no document is read twice.
//!
//! Invariant: the limits hold for the document as it is after every alias is
//! replaced by what it stands for. A walk over the tree is bounded work.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use granit_parser::{ErrorKind, Event, Marker, Options, Parser, ScalarStyle, ScanError, Tag};

use super::limits::{DEPTH, DOCUMENT_BYTES, Deadline, NODES};
use super::path::Segment;
use super::scalar::Scalar;

/// Events between two looks at the clock.
const EVENTS_PER_LOOK: usize = 256;

/// Line and column, from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) line: usize,
    pub(super) column: usize,
}

impl From<&Marker> for Position {
    fn from(marker: &Marker) -> Self {
        Self { line: marker.line(), column: marker.col() + 1 }
    }
}

#[derive(Debug)]
pub(super) struct Node<'a> {
    pub(super) at: Position,
    pub(super) value: Value<'a>,
    size: Size,
}

#[derive(Debug)]
pub(super) enum Value<'a> {
    Scalar(Scalar<'a>),
    Sequence(Vec<Rc<Node<'a>>>),
    /// In the order of the text; no key twice.
    Mapping(Fields<'a>),
}

type Fields<'a> = Vec<(Cow<'a, str>, Rc<Node<'a>>)>;

impl<'a> Node<'a> {
    pub(super) fn get(&self, segment: &Segment) -> Option<&Node<'a>> {
        match (&self.value, segment) {
            (Value::Mapping(entries), Segment::Key(wanted)) => {
                entries.iter().find(|(key, _)| key == wanted).map(|(_, node)| &**node)
            }
            (Value::Sequence(items), Segment::Index(index)) => items.get(*index).map(|node| &**node),
            _ => None,
        }
    }
}

/// Why a document is no tree.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) at: Position,
    pub(super) message: String,
}

/// Size of a value, including everything nested in it.
#[derive(Debug, Clone, Copy, Default)]
struct Size {
    nodes: usize,
    bytes: usize,
    levels: usize,
}

impl Size {
    fn add(&mut self, other: Size) {
        self.nodes = self.nodes.saturating_add(other.nodes);
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.levels = self.levels.max(other.levels);
    }

    fn of_collection(inside: Size) -> Self {
        Self { nodes: inside.nodes + 1, levels: inside.levels + 1, ..inside }
    }
}

/// Reads the one document of `text`; an empty one is null.
pub(super) fn build(text: &str, deadline: Deadline) -> Result<Rc<Node<'_>>, Fault> {
    let mut builder = Builder::default();
    for (count, event) in Parser::new_from_str_with_options(text, options()).enumerate() {
        let (event, span) = event.map_err(|error| fault_of(&error))?;
        let at = Position::from(&span.start);
        if count % EVENTS_PER_LOOK == 0 && deadline.has_passed() {
            return Err(Fault { at, message: "the time for this file is over".to_owned() });
        }
        builder.take(event, at).map_err(|message| Fault { at, message })?;
    }
    let empty = || Node {
        at: Position { line: 1, column: 1 },
        value: Value::Scalar(Scalar::Null),
        size: Size::default(),
    };
    Ok(builder.root.unwrap_or_else(|| Rc::new(empty())))
}

fn options() -> Options {
    let mut options = Options::default();
    options.flow_nesting_limit = DEPTH;
    options.block_nesting_limit = DEPTH;
    options.emit_comments = false;
    options
}

fn fault_of(error: &ScanError) -> Fault {
    let message = match error.kind() {
        ErrorKind::RecursionLimitExceeded => too_deep(),
        _ => error.info(),
    };
    Fault { at: error.marker().into(), message }
}

fn too_deep() -> String {
    format!("more than {DEPTH} levels of sequences and mappings: at most {DEPTH} are read")
}

/// A sequence or mapping whose end has not come yet.
#[derive(Debug)]
struct Open<'a> {
    at: Position,
    anchor: usize,
    inside: Size,
    items: Items<'a>,
}

#[derive(Debug)]
enum Items<'a> {
    Sequence(Vec<Rc<Node<'a>>>),
    Mapping(Entries<'a>),
}

#[derive(Debug, Default)]
struct Entries<'a> {
    entries: Fields<'a>,
    keys: HashSet<Cow<'a, str>>,
    /// A key whose value comes next.
    key: Option<Cow<'a, str>>,
    /// Mappings that `<<` adds, where they do not give a key a second value.
    merged: Vec<Rc<Node<'a>>>,
}

#[derive(Debug, Default)]
struct Builder<'a> {
    open: Vec<Open<'a>>,
    /// Finished nodes that an alias may name.
    anchors: HashMap<usize, Rc<Node<'a>>>,
    root: Option<Rc<Node<'a>>>,
    documents: usize,
    total: Size,
}

/// A node's text where it may be a key, as it is written.
const MERGE_KEY: &str = "<<";

impl<'a> Builder<'a> {
    fn take(&mut self, event: Event<'a>, at: Position) -> Result<(), String> {
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                let scalar = scalar(text, style, tag.as_deref())?;
                let bytes = if let Scalar::Text(text) = &scalar { text.len() } else { 0 };
                let size = Size { nodes: 1, bytes, levels: 0 };
                self.count(size)?;
                self.finish(Node { at, value: Value::Scalar(scalar), size }, anchor)
            }
            Event::Alias(id) => {
                let Some(node) = self.anchors.get(&id).map(Rc::clone) else {
                    return Err("an alias stands inside the value that it names".to_owned());
                };
                self.count(node.size)?;
                self.place(node)
            }
            Event::SequenceStart(_, anchor, tag) => {
                self.start(at, anchor, tag.as_deref(), "seq", Items::Sequence(Vec::new()))
            }
            Event::MappingStart(_, anchor, tag) => {
                self.start(at, anchor, tag.as_deref(), "map", Items::Mapping(Entries::default()))
            }
            Event::SequenceEnd | Event::MappingEnd => self.end(),
            Event::DocumentStart(..) => {
                self.documents += 1;
                match self.documents {
                    1 => Ok(()),
                    _ => Err("a second document begins here without a line '---'".to_owned()),
                }
            }
            _ => Ok(()),
        }
    }

    /// Counts the document as it is once aliases are replaced.
    fn count(&mut self, size: Size) -> Result<(), String> {
        if self.open.len() + size.levels > DEPTH {
            return Err(too_deep());
        }
        self.total.add(size);
        if self.total.nodes > NODES {
            return Err(format!("more than {NODES} values in this document: at most {NODES} are read"));
        }
        if self.total.bytes > DOCUMENT_BYTES {
            return Err(format!(
                "more than {DOCUMENT_BYTES} bytes (3 MiB) of text once aliases are replaced"
            ));
        }
        Ok(())
    }

    fn start(
        &mut self,
        at: Position,
        anchor: usize,
        tag: Option<&Tag>,
        core: &str,
        items: Items<'a>,
    ) -> Result<(), String> {
        if let Some(tag) = tag.filter(|tag| !tag.is_yaml_core_schema_tag(core)) {
            return Err(unsupported(tag));
        }
        if self.open.last().is_some_and(Open::wants_key) {
            return Err("the key of a mapping must be a string".to_owned());
        }
        self.count(Size { nodes: 1, bytes: 0, levels: 1 })?;
        self.open.push(Open { at, anchor, inside: Size::default(), items });
        Ok(())
    }

    fn end(&mut self) -> Result<(), String> {
        let Some(open) = self.open.pop() else { return Ok(()) };
        let value = match open.items {
            Items::Sequence(items) => Value::Sequence(items),
            Items::Mapping(entries) => Value::Mapping(entries.merge()?),
        };
        self.finish(Node { at: open.at, value, size: Size::of_collection(open.inside) }, open.anchor)
    }

    fn finish(&mut self, node: Node<'a>, anchor: usize) -> Result<(), String> {
        let node = Rc::new(node);
        if anchor != 0 {
            self.anchors.insert(anchor, Rc::clone(&node));
        }
        self.place(node)
    }

    /// Puts a node where it belongs: it is the document, an item, a key or a value.
    fn place(&mut self, node: Rc<Node<'a>>) -> Result<(), String> {
        let Some(open) = self.open.last_mut() else {
            self.root = Some(node);
            return Ok(());
        };
        open.inside.add(node.size);
        match &mut open.items {
            Items::Sequence(items) => items.push(node),
            Items::Mapping(entries) => entries.place(node)?,
        }
        Ok(())
    }
}

impl Open<'_> {
    fn wants_key(&self) -> bool {
        matches!(&self.items, Items::Mapping(entries) if entries.key.is_none())
    }
}

impl<'a> Entries<'a> {
    fn place(&mut self, node: Rc<Node<'a>>) -> Result<(), String> {
        let Some(key) = self.key.take() else {
            self.key = Some(self.new_key(&node)?);
            return Ok(());
        };
        if key == MERGE_KEY {
            self.merged.push(node);
        } else {
            self.entries.push((key, node));
        }
        Ok(())
    }

    fn new_key(&mut self, node: &Node<'a>) -> Result<Cow<'a, str>, String> {
        let key = match &node.value {
            Value::Scalar(scalar) => scalar.clone().into_key(),
            Value::Sequence(_) | Value::Mapping(_) => None,
        };
        let key = key.ok_or("the key of a mapping must be a string")?;
        if key != MERGE_KEY && !self.keys.insert(key.clone()) {
            return Err(format!("the key {key:?} is in this mapping already"));
        }
        Ok(key)
    }

    fn merge(mut self) -> Result<Fields<'a>, String> {
        for node in std::mem::take(&mut self.merged) {
            match &node.value {
                Value::Mapping(entries) => self.add_absent(entries),
                Value::Sequence(items) => {
                    for item in items {
                        let Value::Mapping(entries) = &item.value else { return Err(not_mergeable()) };
                        self.add_absent(entries);
                    }
                }
                Value::Scalar(_) => return Err(not_mergeable()),
            }
        }
        Ok(self.entries)
    }

    fn add_absent(&mut self, entries: &[(Cow<'a, str>, Rc<Node<'a>>)]) {
        for (key, node) in entries {
            if self.keys.insert(key.clone()) {
                self.entries.push((key.clone(), Rc::clone(node)));
            }
        }
    }
}

fn not_mergeable() -> String {
    "the value of << must be a mapping or a sequence of mappings".to_owned()
}

fn scalar<'a>(text: Cow<'a, str>, style: ScalarStyle, tag: Option<&Tag>) -> Result<Scalar<'a>, String> {
    match tag {
        None if style == ScalarStyle::Plain => Ok(Scalar::of_plain(text)),
        None => Ok(Scalar::Text(text)),
        Some(tag) if tag.is_yaml_core_schema_tag("str") => Ok(Scalar::Text(text)),
        Some(tag)
            if ["null", "bool", "int", "float"].iter().any(|core| tag.is_yaml_core_schema_tag(core)) =>
        {
            Ok(Scalar::of_plain(text))
        }
        Some(tag) => Err(unsupported(tag)),
    }
}

fn unsupported(tag: &Tag) -> String {
    format!("the tag {} is not supported", tag.original())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(text: &str) -> Fault {
        build(text, Deadline::start()).unwrap_err()
    }

    fn values(node: &Node<'_>) -> usize {
        match &node.value {
            Value::Scalar(_) => 1,
            Value::Sequence(items) => 1 + items.iter().map(|item| values(item)).sum::<usize>(),
            Value::Mapping(entries) => 1 + entries.iter().map(|(_, value)| values(value)).sum::<usize>(),
        }
    }

    #[test]
    fn an_alias_counts_as_what_it_stands_for() {
        let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for level in 1..10 {
            let before = level - 1;
            text += &format!("a{level}: &a{level} [{}]\n", vec![format!("*a{before}"); 10].join(", "));
        }
        let fault = fault(&text);
        assert_eq!((fault.at.line, fault.message.contains("50000 values")), (5, true), "{fault:?}");
    }

    #[test]
    fn text_behind_aliases_counts_each_time() {
        let text = format!("a: &a {}\nb: [{}]\n", "x".repeat(1 << 20), "*a, ".repeat(5));
        assert!(
            fault(&text).message.contains("bytes (3 MiB) of text once aliases"),
            "{:?}",
            fault(&text).message
        );
    }

    #[test]
    fn merged_mappings_fill_what_is_absent_and_count() {
        let tree = build("a: &a {k: 1, l: 2}\nb: {<<: *a, l: 3}\n", Deadline::start()).unwrap();
        let b = tree.get(&Segment::Key("b".to_owned())).unwrap();
        let text = |key: &str| match &b.get(&Segment::Key(key.to_owned())).unwrap().value {
            Value::Scalar(Scalar::Integer(number)) => *number,
            other => panic!("{other:?}"),
        };
        assert_eq!((text("k"), text("l"), values(b)), (1, 3, 3));
        let mut bomb = "a0: &a0 {x0: 1}\n".to_owned();
        for level in 1..30 {
            let before = level - 1;
            bomb += &format!("a{level}: &a{level} {{<<: [*a{before}, *a{before}], x{level}: 1}}\n");
        }
        assert!(fault(&bomb).message.contains("values"), "{:?}", fault(&bomb));
    }

    #[test]
    fn an_alias_inside_its_own_value_is_refused() {
        assert_eq!(fault("a: &a [*a]\n").message, "an alias stands inside the value that it names");
    }

    #[test]
    fn a_key_twice_is_refused_at_the_second() {
        let fault = fault("a: 1\nb: 2\na: 3\n");
        assert_eq!(
            (fault.at, fault.message.as_str()),
            (Position { line: 3, column: 1 }, "the key \"a\" is in this mapping already")
        );
    }
}
