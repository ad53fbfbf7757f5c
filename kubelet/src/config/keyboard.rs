//! The flags of `logs`, `events`, `wait`, `top`, `cp` and `completion`.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::{OutputFormat, RootDir, Scope, Selection, numbers};
use crate::command_line::durations::{self, Span};
use crate::command_line::jsonpath::Template;
use crate::command_line::selectors::LabelSelector;

#[derive(Debug, Args)]
pub struct LogsArgs {
    #[command(flatten)]
    pub root: RootDir,
    /// Namespace
    #[arg(short, long, default_value = crate::objects::DEFAULT_NAMESPACE, value_parser = super::namespace)]
    pub namespace: String,
    #[arg(value_name = "POD", required_unless_present = "selector", value_parser = super::object_name)]
    pub pod: Option<String>,
    #[arg(value_name = "CONTAINER", conflicts_with = "container")]
    pub container_argument: Option<String>,
    /// Pods with these labels
    #[arg(short = 'l', long, value_name = "SELECTOR", conflicts_with = "pod")]
    pub selector: Option<LabelSelector>,
    /// Container [default: the first one, or that of the annotation kubectl.kubernetes.io/default-container]
    #[arg(short, long, default_value = "", hide_default_value = true, conflicts_with = "all_containers")]
    pub container: String,
    /// All containers of the pod, init containers too
    #[arg(long)]
    pub all_containers: bool,
    /// Follow the logs until the containers end
    #[arg(short, long)]
    pub follow: bool,
    /// Print the log of the previous instance
    #[arg(short, long)]
    pub previous: bool,
    /// The last N lines of each log; -1: all [default: all, with a selector 10]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = |text: &str| numbers::whole::<i64>(text, -1))]
    pub tail: Option<i64>,
    #[command(flatten)]
    pub since: Since,
    /// Begin each line with its time
    #[arg(long)]
    pub timestamps: bool,
    /// Begin each line with its pod and container
    #[arg(long)]
    pub prefix: bool,
    /// Maximum number of bytes of each log
    #[arg(long, value_name = "BYTES", value_parser = |text: &str| numbers::whole::<u64>(text, 1))]
    pub limit_bytes: Option<u64>,
    /// How many logs may be followed at the same time
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = |text: &str| numbers::whole::<usize>(text, 0))]
    pub max_log_requests: usize,
}

/// From when on a log is shown.
#[derive(Debug, Args)]
#[group(multiple = false)]
pub struct Since {
    /// Lines that are not older: 5s, 2m, 3h
    #[arg(long, value_name = "TIME", value_parser = durations::not_negative)]
    pub since: Option<Duration>,
    /// Lines from this time on (RFC 3339): 2026-11-20T17:53:02Z
    #[arg(long, value_name = "TIME")]
    pub since_time: Option<jiff::Timestamp>,
}

#[derive(Debug, Args)]
pub struct EventsArgs {
    #[command(flatten)]
    pub root: RootDir,
    #[command(flatten)]
    pub scope: Scope,
    /// Events of this object alone: KIND/NAME
    #[arg(long = "for", value_name = "KIND/NAME")]
    pub subject: Option<String>,
    /// Events of these types alone: Normal, Warning
    #[arg(long, value_name = "TYPE", value_delimiter = ',', ignore_case = true, value_parser = ["Normal", "Warning"])]
    pub types: Vec<String>,
    /// List the events, then print each new one
    #[arg(short, long)]
    pub watch: bool,
    /// Output format: yaml, json, jsonpath=TEMPLATE, name or custom-columns=HEADER:.path,...
    #[arg(short, long, value_name = "FORMAT")]
    pub output: Option<OutputFormat>,
    /// Omit the table's header
    #[arg(long)]
    pub no_headers: bool,
}

#[derive(Debug, Args)]
pub struct WaitArgs {
    #[command(flatten)]
    pub root: RootDir,
    #[command(flatten)]
    pub scope: Scope,
    #[command(flatten)]
    pub selection: Selection,
    /// pod, pvc or another kind; or KIND/NAME
    #[arg(value_name = "KIND")]
    pub kind: String,
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
    /// All objects of the kind in the namespace
    #[arg(long, conflicts_with_all = ["selector", "names"])]
    pub all: bool,
    /// condition=NAME[=VALUE], jsonpath='{.path}'[=VALUE], create or delete
    #[arg(long = "for", value_name = "WHAT")]
    pub what: WaitFor,
    /// How long to wait; 0: look once; negative: a week
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = durations::parse, allow_hyphen_values = true)]
    pub timeout: Span,
}

/// What `wait` waits for.
#[derive(Debug, Clone, PartialEq)]
pub enum WaitFor {
    Create,
    Delete,
    /// The status of a condition, without regard to upper and lower case.
    Condition {
        name: String,
        value: String,
    },
    /// The one value that the template finds; `None`: any.
    Field {
        path: Box<super::output::JsonPath>,
        value: Option<String>,
    },
}

impl FromStr for WaitFor {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.eq_ignore_ascii_case("delete") {
            return Ok(Self::Delete);
        }
        if text.eq_ignore_ascii_case("create") {
            return Ok(Self::Create);
        }
        if let Some(condition) = text.strip_prefix("condition=") {
            let (name, value) = condition.split_once('=').unwrap_or((condition, "true"));
            return Ok(Self::Condition { name: name.to_owned(), value: value.to_owned() });
        }
        let Some(rest) = text.strip_prefix("jsonpath=") else {
            return Err(format!(
                "unrecognized condition: {text:?}: want condition=NAME, jsonpath='{{.path}}'=VALUE, create or delete"
            ));
        };
        // The first `=` outside of braces.
        let end = rest.find('}').map_or(0, |end| rest.rfind('}').unwrap_or(end));
        let (path, value) = match rest[end..].split_once('=') {
            Some((before, value)) => {
                (&rest[..end + before.len()], Some(value.trim_matches(['"', '\'']).to_owned()))
            }
            None => (rest, None),
        };
        if value.as_deref() == Some("") {
            return Err("jsonpath wait has to have a value after equal sign".to_owned());
        }
        let path = Template::relaxed(path.trim_matches(['"', '\''])).map_err(|e| e.to_string())?;
        Ok(Self::Field { path: Box::new(super::output::JsonPath(path)), value })
    }
}

#[derive(Debug, Args)]
pub struct TopArgs {
    #[command(flatten)]
    pub root: RootDir,
    #[command(flatten)]
    pub scope: Scope,
    #[command(flatten)]
    pub selection: Selection,
    #[arg(value_name = "KIND", value_enum)]
    pub kind: Top,
    #[arg(value_name = "NAME", value_parser = super::object_name)]
    pub name: Option<String>,
    /// A line for each container
    #[arg(long)]
    pub containers: bool,
    /// The greatest first
    #[arg(long, value_name = "WHAT", value_parser = ["cpu", "memory"])]
    pub sort_by: Option<String>,
    /// Omit the table's header
    #[arg(long)]
    pub no_headers: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Top {
    #[value(aliases = ["pods", "po"])]
    Pod,
    #[value(aliases = ["nodes", "no"])]
    Node,
}

#[derive(Debug, Args)]
pub struct CopyArgs {
    #[command(flatten)]
    pub root: RootDir,
    /// Namespace
    #[arg(short, long, default_value = crate::objects::DEFAULT_NAMESPACE, value_parser = super::namespace)]
    pub namespace: String,
    /// Container [default: the first one, or that of the annotation kubectl.kubernetes.io/default-container]
    #[arg(short, long, default_value = "", hide_default_value = true)]
    pub container: String,
    /// PATH here, or [NAMESPACE/]POD:PATH
    #[arg(value_name = "FROM")]
    pub from: CopyPlace,
    /// PATH here, or [NAMESPACE/]POD:PATH
    #[arg(value_name = "TO")]
    pub to: CopyPlace,
    /// Leave owners and permissions out
    #[arg(long)]
    pub no_preserve: bool,
    /// How long the container may take; 0: without limit
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = durations::not_negative)]
    pub timeout: Duration,
}

/// One side of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CopyPlace {
    Here(PathBuf),
    Container { namespace: Option<String>, pod: String, path: String },
}

impl FromStr for CopyPlace {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some((pod, path)) = text.split_once(':') else { return Ok(Self::Here(text.into())) };
        if path.is_empty() {
            return Err("filepath can not be empty".to_owned());
        }
        let (namespace, pod) = match pod.split('/').collect::<Vec<_>>().as_slice() {
            ["pod" | "pods" | "po", pod] | [pod] => (None, (*pod).to_owned()),
            [namespace, pod] => (Some((*namespace).to_owned()), (*pod).to_owned()),
            // A colon in the name of a file: `./a:b`.
            _ => return Ok(Self::Here(text.into())),
        };
        if pod.is_empty() || matches!(namespace.as_deref(), Some("" | "." | "..")) {
            return Ok(Self::Here(text.into()));
        }
        Ok(Self::Container { namespace, pod, path: path.to_owned() })
    }
}

#[derive(Debug, Args)]
pub struct CompletionArgs {
    #[arg(value_enum)]
    pub shell: Shell,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Shell {
    Bash,
    Zsh,
    Fish,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_are_read_as_kubectl_reads_them() {
        let condition =
            |name: &str, value: &str| WaitFor::Condition { name: name.to_owned(), value: value.to_owned() };
        assert_eq!("condition=Ready".parse(), Ok(condition("Ready", "true")));
        assert_eq!("condition=Ready=false".parse(), Ok(condition("Ready", "false")));
        assert_eq!("delete".parse(), Ok(WaitFor::Delete));
        for (text, wanted) in [
            ("jsonpath={.status.phase}=Running", Some("Running")),
            ("jsonpath='{.status.phase}'=\"Running\"", Some("Running")),
            ("jsonpath=.status.phase=Running", Some("Running")),
            ("jsonpath={.items[?(@.a=='b')].c}=d", Some("d")),
            ("jsonpath={.items[?(@.a=='b')].c}", None),
            ("jsonpath={.status.podIP}", None),
        ] {
            let Ok(WaitFor::Field { value, .. }) = text.parse() else { panic!("{text}") };
            assert_eq!(value.as_deref(), wanted, "{text}");
        }
        for text in ["ready", "condition", "jsonpath={.a}=", "jsonpath={.a["] {
            assert!(text.parse::<WaitFor>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_colon_separates_a_pod_from_its_path() {
        let there = |namespace: Option<&str>, pod: &str, path: &str| {
            Ok(CopyPlace::Container {
                namespace: namespace.map(str::to_owned),
                pod: pod.to_owned(),
                path: path.to_owned(),
            })
        };
        assert_eq!("web:/etc/hosts".parse(), there(None, "web", "/etc/hosts"));
        assert_eq!("pod/web:x".parse(), there(None, "web", "x"));
        assert_eq!("shop/web:/x".parse(), there(Some("shop"), "web", "/x"));
        for here in ["/etc/hosts", "./a:b", "/tmp/a:b", "../x/a:b"] {
            assert_eq!(here.parse(), Ok(CopyPlace::Here(here.into())), "{here}");
        }
        "web:".parse::<CopyPlace>().unwrap_err();
    }
}
