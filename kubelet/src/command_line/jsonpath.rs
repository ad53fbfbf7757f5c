//! kubectl's JSONPath templates (k8s.io/client-go/util/jsonpath): text, and paths in braces.
//!
//! `{.items[*].metadata.name}` writes what the path finds, with a space between two values. `{range …}…{end}`
//! repeats a part of the template, and `{"\n"}` is text. A field that is missing is no error, an index
//! beyond the end is one.
//!
//! It is a dialect of its own: RFC 9535 has no templates, no `range`, and paths in quotes are keys there.

mod evaluate;
mod parse;

use serde_json::Value;

use evaluate::Budget;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("error parsing jsonpath {template}, {problem}")]
    Parse { template: String, problem: String },
    #[error("array index out of bounds: index {index}, length {length}")]
    OutOfBounds { index: i64, length: usize },
    #[error("can only compare one element at a time")]
    Comparison,
    #[error("the template finds more than {}", .0)]
    TooMuch(&'static str),
}

/// A template that was read.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Template(Vec<Part>);

#[derive(Debug, Clone, PartialEq)]
enum Part {
    Text(String),
    Path(Path),
    Range { over: Path, body: Vec<Part> },
}

type Path = Vec<Step>;

/// From each value that was found so far to the next ones.
#[derive(Debug, Clone, PartialEq)]
enum Step {
    /// `$`
    Root,
    /// `.name`, or `['name']`, where dots separate names unless the name as a whole is there.
    Field(String),
    /// `..`
    Descendants,
    /// `.*`, `[*]`
    All,
    /// `[n]`, from the end where negative.
    Index(i64),
    /// `[from:to:step]`
    Slice { from: Option<i64>, to: Option<i64>, step: usize },
    /// `[a,b]`
    Union(Vec<Path>),
    /// `[?(…)]`
    Filter(Box<Filter>),
}

#[derive(Debug, Clone, PartialEq)]
struct Filter {
    left: Operand,
    /// `None`: whether `left` exists.
    compared: Option<(Operator, Operand)>,
}

#[derive(Debug, Clone, PartialEq)]
enum Operand {
    Path(Path),
    Constant(Value),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operator {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

impl Template {
    pub(crate) fn parse(text: &str) -> Result<Self, Error> {
        parse::template(text).map(Self).map_err(|problem| Error::Parse { template: text.to_owned(), problem })
    }

    /// An expression whose braces and first dot may be missing, as `wait`, `--sort-by` and
    /// `custom-columns` take it.
    pub(crate) fn relaxed(text: &str) -> Result<Self, Error> {
        let inner = text.strip_prefix('{').and_then(|text| text.strip_suffix('}')).unwrap_or(text);
        let dot = if inner.starts_with(['.', '$', '@', '[']) { "" } else { "." };
        Self::parse(&format!("{{{dot}{inner}}}"))
    }

    /// The template's text for `root`.
    pub(crate) fn render(&self, root: &Value) -> Result<String, Error> {
        let mut out = String::new();
        evaluate::render(&self.0, root, root, &mut Budget::default(), &mut out)?;
        Ok(out)
    }

    /// What the template's paths find, ranges left aside.
    pub(crate) fn find<'v>(&self, root: &'v Value) -> Result<Vec<&'v Value>, Error> {
        let mut budget = Budget::default();
        let mut found = Vec::new();
        for part in &self.0 {
            if let Part::Path(path) = part {
                found.extend(evaluate::find(path, root, root, &mut budget)?);
            }
        }
        Ok(found)
    }
}

/// A value as templates write it: strings as they are, collections as JSON.
pub(crate) fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Two nodes and two users, as the documentation of kubectl's JSONPath has them, in other words.
    fn sample() -> Value {
        json!({
            "kind": "List",
            "items": [
                {"kind": "None", "metadata": {"name": "10.0.0.1", "labels": {"app.kubernetes.io/name": "one"}},
                 "status": {"capacity": {"cpu": "4"}, "addresses": [{"type": "old", "address": "10.0.0.1"}]}},
                {"kind": "None", "metadata": {"name": "10.0.0.2"},
                 "status": {"capacity": {"cpu": "8"},
                    "addresses": [{"type": "old", "address": "10.0.0.2"}, {"type": "new", "address": "10.0.1.2"}]}},
            ],
            "users": [
                {"name": "ann", "user": {}, "age": 5},
                {"name": "eve", "user": {"username": "admin", "password": "hush"}, "age": 12},
            ],
        })
    }

    fn render(template: &str) -> String {
        Template::parse(template)
            .and_then(|template| template.render(&sample()))
            .unwrap_or_else(|e| e.to_string())
    }

    #[test]
    fn the_documented_templates_give_what_kubectl_gives() {
        for (template, expected) in [
            ("kind is {.kind}", "kind is List"),
            ("{.kind} {$.kind} {@.kind} {['kind']}", "List List List List"),
            ("{..name}", "10.0.0.1 10.0.0.2 ann eve"),
            ("{.items[*].metadata.name}", "10.0.0.1 10.0.0.2"),
            ("{.users[0].name} {.users[-1].name}", "ann eve"),
            (
                "{.users[-2:].name}|{.users[0:1].name}|{.users[::2].name}|{.users[1:].name}",
                "ann eve|ann|ann|eve",
            ),
            (
                "{.items[*]['metadata.name', 'status.capacity']}",
                "10.0.0.1 10.0.0.2 {\"cpu\":\"4\"} {\"cpu\":\"8\"}",
            ),
            ("{.users[0,1].name}", "ann eve"),
            ("{.users[?(@.name==\"eve\")].user.password}", "hush"),
            ("{.users[?(@.age>5)].name}{.users[?(@.age<=5)].name}", "eveann"),
            ("{.users[?(@.age!=5)].name}", "eve"),
            ("{.users[?(@.user.username)].name}", "eve"),
            ("{.items[*].status.addresses[?(@.type=='new')].address}", "10.0.1.2"),
            (
                "{range .items[*]}[{.metadata.name}, {.status.capacity}] {end}",
                "[10.0.0.1, {\"cpu\":\"4\"}] [10.0.0.2, {\"cpu\":\"8\"}] ",
            ),
            ("{range .users[*]}{.name}{\"\\t\"}{.age}{'\\n'}{end}", "ann\t5\neve\t12\n"),
            ("{range .items[*]}{range .status.addresses[*]}{.type},{end};{end}", "old,;old,new,;"),
            (r"{.items[0].metadata.labels.app\.kubernetes\.io/name}", "one"),
            (r"{.items[0].metadata.labels['app\.kubernetes\.io/name']}", "one"),
            ("{.items[0].metadata.labels['app.kubernetes.io/name']}", "one"),
            (
                "{.items[*].status.*}",
                "{\"cpu\":\"4\"} [{\"type\":\"old\",\"address\":\"10.0.0.1\"}] {\"cpu\":\"8\"} \
              [{\"type\":\"old\",\"address\":\"10.0.0.2\"},{\"type\":\"new\",\"address\":\"10.0.1.2\"}]",
            ),
            ("{.users[1].user}", "{\"username\":\"admin\",\"password\":\"hush\"}"),
            ("{.none.there}-{.kind.deeper}-", "--"),
            ("no braces", "no braces"),
            ("", ""),
        ] {
            assert_eq!(render(template), expected, "{template}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        for (template, problem) in [
            ("{.users[7].name}", "array index out of bounds: index 7, length 2"),
            ("{.users[-3].name}", "array index out of bounds: index -3, length 2"),
            ("{.kind", "error parsing jsonpath {.kind, unclosed action"),
            ("{.users[0}", "error parsing jsonpath {.users[0}, unterminated array"),
            ("{.users[x]}", "error parsing jsonpath {.users[x]}, invalid array index x"),
            (
                "{range .users[*]}{.name}",
                "error parsing jsonpath {range .users[*]}{.name}, unmatched range: no end",
            ),
            ("{.name}{end}", "error parsing jsonpath {.name}{end}, not in range"),
            ("{\"open}", "error parsing jsonpath {\"open}, unterminated quoted string"),
            (
                "{.users[?(@.name=='eve'].x}",
                "error parsing jsonpath {.users[?(@.name=='eve'].x}, unterminated filter",
            ),
            (
                "{.users[?(@.a=='b' && @.c=='d')]}",
                "error parsing jsonpath {.users[?(@.a=='b' && @.c=='d')]}, unrecognized text in a filter: && @.c=='d'",
            ),
            ("{%}", "error parsing jsonpath {%}, unrecognized character in action: '%'"),
            ("{.users[?(@.user..x==1)]}", ""),
        ] {
            assert_eq!(render(template), problem, "{template}");
        }
    }

    #[test]
    fn what_it_writes_is_bounded() {
        let too_much = |template: &str, value: &Value| {
            let error = Template::parse(template).unwrap().render(value).unwrap_err();
            assert!(matches!(error, Error::TooMuch(_)), "{error}");
        };
        too_much("{range [*]}{range $[*]}{range $[*]}{end}{end}{end}", &json!(vec![0; 400]));
        let mut values = vec![json!("x".repeat(1 << 20))];
        values.resize(100, json!(1));
        too_much("{range [*]}{$[0]}{end}", &Value::Array(values));
        let deep = "{range .a}".repeat(200) + &"{end}".repeat(200);
        assert!(
            Template::parse(&deep).unwrap_err().to_string().ends_with("more than 32 ranges in each other")
        );
        let nested = format!("{{{}}}", ".a[?(@".repeat(200));
        Template::parse(&nested).unwrap_err();
    }

    #[test]
    fn the_limit_is_that_of_all_values_that_are_looked_at() {
        let item: Value = (0..12).map(|field| (format!("f{field}"), json!(field))).collect();
        let items = json!({"items": vec![item; 1000]});
        for template in ["{.items[*].*}", "{.items[:].*}", "{.items[*]['f0','f1']}", "{.items[?(@.f0==0)].*}"]
        {
            Template::parse(template).unwrap().render(&items).unwrap();
        }
        let lists = json!(vec![vec![0; 1000]; 10]);
        let slices = format!("{{[*][{}]}}", vec!["0:"; 1000].join(","));
        let constants = "{range [*][*]}{$[*][?(1==2)]}{end}";
        for template in [&slices, constants] {
            let error = Template::parse(template).unwrap().render(&lists).unwrap_err();
            assert_eq!(error, Error::TooMuch("5,000,000 values"), "{template}");
        }
    }

    /// What a template is cut to is a template or an error.
    #[test]
    fn no_text_ends_the_program() {
        let templates = [
            r#"{range .items[?(@.a=="b\"")]}{.metadata.labels['a\.b']}{"\n\t"}{end} tail"#,
            "{..name[0:-1:2]}{.a[1,'b',*]}{$.x}{@}{.}{..}{[}",
            "{.größe['é']}{\"é\"}",
        ];
        for template in templates {
            let cuts: Vec<usize> = template.char_indices().map(|(at, _)| at).collect();
            for from in &cuts {
                for to in cuts.iter().filter(|to| *to >= from) {
                    if let Ok(template) = Template::parse(&template[*from..*to]) {
                        let _found_or_not = template.render(&sample());
                    }
                }
            }
        }
    }

    #[test]
    fn short_expressions_are_completed() {
        for text in ["{.kind}", ".kind", "kind", "{kind}", "$.kind", "['kind']"] {
            let found = Template::relaxed(text).unwrap();
            assert_eq!(found.find(&sample()).unwrap(), [&json!("List")], "{text}");
        }
        assert!(Template::relaxed(".none").unwrap().find(&sample()).unwrap().is_empty());
    }
}
