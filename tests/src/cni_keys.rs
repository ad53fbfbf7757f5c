//! docs/CNI.md against the parsers of the plugins: each of its tables names the keys of one
//! parser's table, and each of these keys is read.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

const DOCUMENT: &str = include_str!("../../docs/CNI.md");

/// Fails unless the table of the document's `section` has just these keys.
#[track_caller]
pub fn assert_documented(section: &str, keys: &[&str]) {
    let documented = documented(section);
    let keys: BTreeSet<String> = keys.iter().map(|key| (*key).to_owned()).collect();
    let unwritten: Vec<_> = keys.difference(&documented).collect();
    assert!(unwritten.is_empty(), "not in docs/CNI.md, \"{section}\": {unwritten:#?}");
    let unread: Vec<_> = documented.difference(&keys).collect();
    assert!(unread.is_empty(), "in docs/CNI.md, \"{section}\", but not in the parser's table: {unread:#?}");
}

/// Fails unless `read` looks at each key: a configuration in which it has an object, which is
/// the right type for none, has to be an error that names the key. `base` is what the
/// configuration needs beside it; `read` returns the error's text.
#[track_caller]
pub fn assert_read(keys: &[&str], base: &Value, read: impl Fn(&Value) -> Result<(), String>) {
    for key in keys {
        let mut configuration = base.clone();
        put(&mut configuration, key, json!({"an": "object"}));
        let place = key.replace("[]", "[0]");
        match read(&configuration) {
            Err(text) if text.contains(&place) => {}
            other => panic!("{key} is not read: {other:?}\n{configuration}"),
        }
    }
}

/// Puts `value` at `path`; a list on the way gets one element.
fn put(at: &mut Value, path: &str, value: Value) {
    let end = path.find(['.', '[']).unwrap_or(path.len());
    // A key such as cni.dev/attachments has a dot of its own.
    let end = if path.starts_with("cni.dev/") { path.find('[').unwrap_or(path.len()) } else { end };
    let (key, rest) = path.split_at(end);
    let mut here = at;
    if !key.is_empty() {
        if !here.is_object() {
            *here = Value::Object(Map::new());
        }
        here = &mut here[key];
    }
    match rest.strip_prefix("[]") {
        Some(rest) => {
            if !here.is_array() {
                *here = json!([null]);
            }
            put(&mut here[0], rest, value);
        }
        None if rest.is_empty() => *here = value,
        None => put(here, rest.trim_start_matches('.'), value),
    }
}

/// The first cells of the section's first table whose head begins with `key`.
fn documented(section: &str) -> BTreeSet<String> {
    let heading = format!("## {section}");
    let mut lines = DOCUMENT.lines().skip_while(|line| *line != heading).skip(1).peekable();
    assert!(lines.peek().is_some(), "docs/CNI.md has no section {section:?}");
    let table = lines
        .take_while(|line| !line.starts_with("## "))
        .skip_while(|line| !line.starts_with("| key |"))
        .skip(2)
        .take_while(|line| line.starts_with('|'));
    let key = |row: &str| row.split('`').nth(1).expect("a row begins with a key").to_owned();
    table.map(key).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_put_where_its_path_leads() {
        let mut at = json!({"name": "n", "a": {"x": 1}});
        for path in ["a.b", "l[][].c", "cni.dev/valid-attachments[].d"] {
            put(&mut at, path, json!(7));
        }
        let wanted = json!({
            "name": "n",
            "a": {"x": 1, "b": 7},
            "l": [[{"c": 7}]],
            "cni.dev/valid-attachments": [{"d": 7}]
        });
        assert_eq!(at, wanted);
    }
}
