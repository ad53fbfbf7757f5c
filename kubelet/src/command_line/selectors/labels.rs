//! `-l`: selectors of labels, by equality and by sets (k8s.io/apimachinery/pkg/labels).

use std::str::FromStr;

use serde_json::Value;

use crate::objects::LabelOperator;

/// All of them must hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LabelSelector(Vec<Requirement>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Requirement {
    key: String,
    rule: Rule,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Rule {
    /// With the values that it names.
    Set(LabelOperator, Vec<String>),
    /// As integers.
    Greater(i64),
    Less(i64),
}

impl LabelSelector {
    /// Whether every object is as wanted.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether the object's labels are as wanted.
    pub(crate) fn matches(&self, object: &Value) -> bool {
        let labels = &object["metadata"]["labels"];
        self.0.iter().all(|Requirement { key, rule }| {
            let value = labels.get(key).and_then(Value::as_str);
            let number = value.and_then(|value| value.parse::<i64>().ok());
            match rule {
                Rule::Set(operator, values) => operator.holds(value, values),
                Rule::Greater(limit) => number.is_some_and(|number| number > *limit),
                Rule::Less(limit) => number.is_some_and(|number| number < *limit),
            }
        })
    }
}

impl FromStr for LabelSelector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        split(text).into_iter().map(|part| requirement(part.trim())).collect::<Result<_, _>>().map(Self)
    }
}

/// At the commas outside of parentheses.
fn split(text: &str) -> Vec<&str> {
    let mut depth = 0_i32;
    text.split(|letter| {
        depth += i32::from(letter == '(') - i32::from(letter == ')');
        letter == ',' && depth == 0
    })
    .collect()
}

fn requirement(text: &str) -> Result<Requirement, String> {
    if let Some(key) = text.strip_prefix('!') {
        return Ok(Requirement {
            key: key_of(key)?,
            rule: Rule::Set(LabelOperator::DoesNotExist, Vec::new()),
        });
    }
    if let Some((key, values)) = text.split_once('(') {
        let values =
            values.trim_end().strip_suffix(')').ok_or_else(|| format!("found no ')' in {text:?}"))?;
        let values: Vec<String> =
            values.split(',').map(|value| value_of(value, text)).collect::<Result<_, _>>()?;
        let mut words = key.split_whitespace();
        let rule = match (words.next(), words.next(), words.next()) {
            (Some(key), Some("in"), None) => (key, Rule::Set(LabelOperator::In, values)),
            (Some(key), Some("notin"), None) => (key, Rule::Set(LabelOperator::NotIn, values)),
            _ => return Err(format!("want KEY in (…) or KEY notin (…), found {text:?}")),
        };
        return Ok(Requirement { key: key_of(rule.0)?, rule: rule.1 });
    }
    for (operator, negative) in [("!=", true), ("==", false), ("=", false)] {
        if let Some((key, value)) = text.split_once(operator) {
            let values = vec![value_of(value, text)?];
            let operator = if negative { LabelOperator::NotIn } else { LabelOperator::In };
            return Ok(Requirement { key: key_of(key)?, rule: Rule::Set(operator, values) });
        }
    }
    for (operator, rule) in [('>', Rule::Greater as fn(i64) -> Rule), ('<', Rule::Less)] {
        if let Some((key, value)) = text.split_once(operator) {
            let number = value.trim().parse();
            let number =
                number.map_err(|_| format!("for {operator:?} the value must be an integer: {text:?}"))?;
            return Ok(Requirement { key: key_of(key)?, rule: rule(number) });
        }
    }
    Ok(Requirement { key: key_of(text)?, rule: Rule::Set(LabelOperator::Exists, Vec::new()) })
}

fn key_of(text: &str) -> Result<String, String> {
    let key = text.trim();
    let is_name = |name: &str| {
        let end = |letter: char| letter.is_ascii_alphanumeric();
        (1..=63).contains(&name.len())
            && name.starts_with(end)
            && name.ends_with(end)
            && name.chars().all(|letter| letter.is_ascii_alphanumeric() || "-_.".contains(letter))
    };
    let valid = match key.split_once('/') {
        Some((prefix, name)) => (1..=253).contains(&prefix.len()) && is_name(name) && !prefix.contains(' '),
        None => is_name(key),
    };
    if valid { Ok(key.to_owned()) } else { Err(format!("{key:?} is no key of a label")) }
}

fn value_of(value: &str, text: &str) -> Result<String, String> {
    let value = value.trim();
    if value.contains(['=', '!', '(', ')', ' ', '<', '>']) {
        return Err(format!("{value:?} is no value of a label: {text:?}"));
    }
    Ok(value.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn objects_are_selected_by_equality_and_by_sets() {
        let object = json!({"metadata": {"labels": {
            "app": "web", "tier": "front", "app.kubernetes.io/part-of": "shop", "size": "7", "empty": "",
        }}});
        for (selector, expected) in [
            ("", true),
            ("app=web", true),
            ("app==web,tier=front", true),
            ("app=web,tier=back", false),
            ("app!=web", false),
            ("none!=web", true),
            ("app in (web, db)", true),
            ("app in (db),tier", false),
            ("app notin (db,cache)", true),
            ("app notin (web)", false),
            ("none notin (web)", true),
            ("app", true),
            ("none", false),
            ("!none", true),
            ("! app", false),
            ("app.kubernetes.io/part-of=shop", true),
            ("size>6,size<8", true),
            ("size>7", false),
            ("app>1", false),
            ("empty=", true),
            ("app=", false),
            ("tier in (front,back),app in (web)", true),
        ] {
            let selected = selector.parse::<LabelSelector>().unwrap().matches(&object);
            assert_eq!(selected, expected, "{selector}");
        }
        assert!("app!=web".parse::<LabelSelector>().unwrap().matches(&json!({"metadata": {}})));
    }

    #[test]
    fn a_selector_with_a_mistake_is_refused() {
        for selector in [
            "app in web",
            "app in (web",
            "=web",
            "a b=c",
            "app=a=b",
            "app>x",
            "app within (a)",
            "/x",
            "-a",
            ",",
            "app,",
            ",app",
            "a, ,b",
        ] {
            assert!(selector.parse::<LabelSelector>().is_err(), "{selector}");
        }
    }
}
