//! Objects as YAML, as `kubectl get -o yaml` writes them.
//!
//! Writes JSON's few types. A string is unquoted only if every YAML reader, old or new, reads it as
//! that string. All others are in JSON's quotes, which are valid YAML.

use std::fmt::Write;

use serde_json::Value;

use super::printable::{is_unseen, printable_json};

pub(super) fn write(value: &Value) -> String {
    let mut text = String::new();
    match value {
        Value::Object(_) | Value::Array(_) => block(value, 0, &mut text),
        _ => inline(value, 0, &mut text),
    }
    text
}

/// Writes a collection, one line each from its indentation to its end. An empty one takes one line.
fn block(value: &Value, indent: usize, out: &mut String) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (name, field) in fields {
                pad(indent, out);
                scalar(name, out);
                out.push(':');
                after_key(field, indent, out);
            }
        }
        Value::Array(items) if !items.is_empty() => {
            for item in items {
                pad(indent, out);
                out.push('-');
                let start = out.len();
                let nested = matches!(item, Value::Object(fields) if !fields.is_empty())
                    || matches!(item, Value::Array(items) if !items.is_empty());
                if nested {
                    block(item, indent + 2, out);
                    // The first line of the nested value follows the dash.
                    out.replace_range(start..start + indent + 2, " ");
                } else {
                    out.push(' ');
                    inline(item, indent, out);
                }
            }
        }
        _ => {
            pad(indent, out);
            inline(value, indent, out);
        }
    }
}

fn after_key(value: &Value, indent: usize, out: &mut String) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            out.push('\n');
            block(value, indent + 2, out);
        }
        // Like kubectl, indent a sequence as far as its name.
        Value::Array(items) if !items.is_empty() => {
            out.push('\n');
            block(value, indent, out);
        }
        _ => {
            out.push(' ');
            inline(value, indent, out);
        }
    }
}

fn inline(value: &Value, indent: usize, out: &mut String) {
    match value {
        Value::String(text) if is_block_text(text) => return literal(text, indent, out),
        Value::String(text) => scalar(text, out),
        Value::Null | Value::Bool(_) | Value::Number(_) => {
            write!(out, "{value}").expect("a String takes everything");
        }
        Value::Array(_) => out.push_str("[]"),
        Value::Object(_) => out.push_str("{}"),
    }
    out.push('\n');
}

fn scalar(text: &str, out: &mut String) {
    if is_bare(text) {
        out.push_str(text);
    } else {
        // JSON does not escape DEL, C1 control characters and invisible characters; a terminal acts
        // on them. YAML has no surrogate pairs.
        for letter in Value::from(text).to_string().chars() {
            match u32::from(letter) {
                code @ 0x1_0000.. if is_unseen(letter) => {
                    write!(out, "\\U{code:08x}").expect("a String takes everything");
                }
                _ => out.push_str(&printable_json(letter.encode_utf8(&mut [0; 4]))),
            }
        }
    }
}

/// Printable lines that a literal block preserves.
fn is_block_text(text: &str) -> bool {
    text.contains('\n')
        && !text.starts_with([' ', '\n'])
        && !text.ends_with("\n\n")
        && text.lines().all(|line| !line.ends_with(' '))
        && text.chars().all(|letter| letter == '\n' || is_plain_letter(letter))
}

fn literal(text: &str, indent: usize, out: &mut String) {
    out.push_str(if text.ends_with('\n') { "|\n" } else { "|-\n" });
    for line in text.lines() {
        if !line.is_empty() {
            pad(indent + 2, out);
        }
        out.push_str(line);
        out.push('\n');
    }
}

/// Not a control character, an invisible one, U+FFFD or a line break of YAML 1.1.
fn is_plain_letter(letter: char) -> bool {
    !letter.is_control() && !is_unseen(letter) && !matches!(letter, '\u{2028}' | '\u{2029}')
}

/// A word, path or name without YAML marks, which does not look like a number or a YAML 1.1
/// keyword.
fn is_bare(text: &str) -> bool {
    const WORDS: &[&str] = &["y", "n", "yes", "no", "on", "off", "true", "false", "null"];
    let first = text.starts_with(|first: char| first.is_ascii_alphabetic() || first == '/' || first == '_');
    let inner = |letter: char| letter.is_ascii_alphanumeric() || "/._-+@$(),;=".contains(letter);
    let spaced = |(at, letter): (usize, char)| match letter {
        ' ' => at + 1 < text.len(),
        ':' => text[at + 1..].starts_with(inner),
        _ => inner(letter),
    };
    first && text.char_indices().all(spaced) && !WORDS.contains(&text.to_ascii_lowercase().as_str())
}

fn pad(indent: usize, out: &mut String) {
    out.extend(std::iter::repeat_n(' ', indent));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn yaml_is_written_as_kubectl_writes_it() {
        let value = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "web", "labels": {}, "annotations": {"hawser.dev/x": "yes", "n": "12"}},
            "spec": {"containers": [{"name": "c", "args": ["a b", "", "- x", "k: v", "http://x:1/"], "ports": []}], "grace": 0.5},
            "list": [[1, [true]], null], "script": "a\n\n  b\n", "end": "a\nb", "odd": "a\n b \n", "tab": "\t", "csi": "\u{9b}2J",
        });
        assert_eq!(
            write(&value),
            "apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\n  labels: {}\n  annotations:\n    hawser.dev/x: \"yes\"\n    \
             \"n\": \"12\"\nspec:\n  containers:\n  - name: c\n    args:\n    - a b\n    - \"\"\n    - \"- x\"\n    - \"k: v\"\n    \
             - http://x:1/\n    ports: []\n  grace: 0.5\nlist:\n- - 1\n  - - true\n- null\nscript: |\n  a\n\n    b\nend: |-\n  a\n  b\nodd: \"a\\n b \\n\"\n\
             tab: \"\\t\"\ncsi: \"\\u009b2J\"\n"
        );
    }
}
