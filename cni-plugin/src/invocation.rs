//! One call of a plugin: the protocol's environment variables, validated, and the configuration.

use std::path::PathBuf;

use crate::{CniError, NetConf, code};

/// The CNI command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    Add,
    Check,
    Del,
    Gc,
    Status,
    Version,
}

impl Command {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Check => "CHECK",
            Self::Del => "DEL",
            Self::Gc => "GC",
            Self::Status => "STATUS",
            Self::Version => "VERSION",
        }
    }

    const ALL: [Self; 6] = [Self::Add, Self::Check, Self::Del, Self::Gc, Self::Status, Self::Version];

    /// Whether it uses the attachment's variables (container id, interface name).
    fn is_attachment(self) -> bool {
        matches!(self, Self::Add | Self::Check | Self::Del)
    }
}

/// The protocol's variables; an unset one is empty, as in the reference.
#[derive(Clone, Debug, Default)]
pub struct Environment(Vec<(&'static str, String)>);

const NAMES: [&str; 7] = [
    "CNI_COMMAND",
    "CNI_CONTAINERID",
    "CNI_NETNS",
    "CNI_IFNAME",
    "CNI_ARGS",
    "CNI_PATH",
    "CNI_NETNS_OVERRIDE",
];

impl Environment {
    pub fn from_process() -> Self {
        Self::from_lookup(|name| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned()))
    }

    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Self {
        Self(NAMES.into_iter().filter_map(|name| Some((name, lookup(name)?))).collect())
    }

    fn get(&self, name: &str) -> &str {
        self.0.iter().find(|(known, _)| *known == name).map_or("", |(_, value)| value)
    }

    /// Whether a user called the program instead of a runtime.
    pub(crate) fn has_no_command(&self) -> bool {
        self.get("CNI_COMMAND").is_empty()
    }

    /// Validates the variables that the command needs. As in the reference, invalid values are
    /// reported before missing ones.
    pub(crate) fn check(&self) -> Result<Attachment, CniError> {
        let asked = self.get("CNI_COMMAND");
        let command = Command::ALL.into_iter().find(|command| command.as_str() == asked);
        let mut missing = Vec::new();
        for name in NAMES {
            let value = self.get(name);
            let required = name == "CNI_COMMAND" || command.is_some_and(|command| requires(command, name));
            match (required, value) {
                (true, "") => missing.push(name),
                (true, value) if name == "CNI_CONTAINERID" => check_container_id(value)?,
                (true, value) if name == "CNI_IFNAME" => {
                    check_interface_name(value)?;
                    // DEL must still remove what other versions made under this name.
                    if command == Some(Command::Add) {
                        check_template(value)?;
                    }
                }
                _ => {}
            }
        }
        if !missing.is_empty() {
            return Err(invalid(format_args!("required env variables [{}] missing", missing.join(","))));
        }
        let Some(command) = command else {
            return Err(invalid(format_args!("unknown CNI_COMMAND: {asked}")));
        };
        let override_netns = self.get("CNI_NETNS_OVERRIDE");
        Ok(Attachment {
            command,
            container_id: self.get("CNI_CONTAINERID").to_owned(),
            netns: self.get("CNI_NETNS").to_owned(),
            ifname: self.get("CNI_IFNAME").to_owned(),
            args: self.get("CNI_ARGS").to_owned(),
            path: split_path(self.get("CNI_PATH")),
            own_netns_allowed: override_netns == "1" || override_netns.eq_ignore_ascii_case("true"),
        })
    }
}

fn requires(command: Command, name: &str) -> bool {
    match name {
        "CNI_CONTAINERID" | "CNI_IFNAME" => command.is_attachment(),
        "CNI_NETNS" => matches!(command, Command::Add | Command::Check),
        "CNI_PATH" => command != Command::Version,
        _ => false,
    }
}

fn split_path(path: &str) -> Vec<PathBuf> {
    path.split(':').filter(|dir| !dir.is_empty()).map(PathBuf::from).collect()
}

/// The validated variables.
#[derive(Clone, Debug)]
pub(crate) struct Attachment {
    pub(crate) command: Command,
    pub(crate) container_id: String,
    pub(crate) netns: String,
    pub(crate) ifname: String,
    pub(crate) args: String,
    pub(crate) path: Vec<PathBuf>,
    pub(crate) own_netns_allowed: bool,
}

/// One validated call: the argument of a verb's function.
#[derive(Clone, Debug)]
pub struct Invocation {
    pub command: Command,
    /// For ADD, CHECK and DEL: non-empty, safe as a file name.
    pub container_id: String,
    /// `CNI_NETNS` as passed. Set for ADD and CHECK. `None` is legal for DEL, since the namespace
    /// may be gone.
    pub netns: Option<PathBuf>,
    /// For ADD, CHECK and DEL: a valid interface name.
    pub ifname: String,
    /// `CNI_ARGS`; see [`crate::args::parse`].
    pub args: String,
    /// `CNI_PATH`: the directories of delegates.
    pub path: Vec<PathBuf>,
    pub conf: NetConf,
}

impl Invocation {
    pub(crate) fn new(attachment: Attachment, conf: NetConf) -> Self {
        let Attachment { command, container_id, netns, ifname, args, path, own_netns_allowed: _ } =
            attachment;
        let netns = (!netns.is_empty()).then(|| PathBuf::from(netns));
        Self { command, container_id, netns, ifname, args, path, conf }
    }
}

/// A letter or digit, then letters, digits, `_`, `.`, `-`.
pub(crate) fn is_identifier(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'))
}

fn check_container_id(id: &str) -> Result<(), CniError> {
    if is_identifier(id) {
        Ok(())
    } else {
        Err(invalid("invalid characters in containerID").with_details(id))
    }
}

fn check_interface_name(name: &str) -> Result<(), CniError> {
    // IFNAMSIZ is 16 with the final zero.
    if name.len() > 15 {
        Err(invalid("interface name is too long")
            .with_details("interface name should be less than 16 characters"))
    } else if name == "." || name == ".." {
        Err(invalid("interface name is . or .."))
    } else if name.chars().any(|c| c == '/' || c == ':' || c.is_whitespace()) {
        Err(invalid("interface name contains / or : or whitespace characters"))
    } else {
        Ok(())
    }
}

/// The kernel turns `eth%d` into the first free of `eth0`, `eth1` and so on, so later calls could
/// not find it. It refuses any other `%` (`dev_alloc_name`).
fn check_template(name: &str) -> Result<(), CniError> {
    if name.contains('%') {
        return Err(invalid("interface name contains %").with_details(format_args!(
            "CNI_IFNAME: the kernel would take {name:?} for a template of names"
        )));
    }
    Ok(())
}

fn invalid(msg: impl std::fmt::Display) -> CniError {
    CniError::new(code::INVALID_ENVIRONMENT_VARIABLES, msg)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(pairs: &[(&str, &str)]) -> Result<Attachment, CniError> {
        let lookup = |name: &str| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        Environment::from_lookup(lookup).check()
    }

    #[test]
    fn missing_variables_are_listed_together() {
        let err = check(&[("CNI_COMMAND", "ADD")]).unwrap_err();
        assert_eq!(err.code, 4);
        assert_eq!(err.msg, "required env variables [CNI_CONTAINERID,CNI_NETNS,CNI_IFNAME,CNI_PATH] missing");
        assert_eq!(check(&[]).unwrap_err().msg, "required env variables [CNI_COMMAND] missing");
        assert_eq!(
            check(&[("CNI_COMMAND", "STATUS")]).unwrap_err().msg,
            "required env variables [CNI_PATH] missing"
        );
        check(&[("CNI_COMMAND", "VERSION")]).unwrap();
    }

    #[test]
    fn del_needs_no_namespace() {
        let call = check(&[
            ("CNI_COMMAND", "DEL"),
            ("CNI_CONTAINERID", "c"),
            ("CNI_IFNAME", "e"),
            ("CNI_PATH", "/a::/b"),
        ]);
        assert_eq!(call.unwrap().path, [PathBuf::from("/a"), PathBuf::from("/b")]);
    }

    #[test]
    fn invalid_values_are_reported_before_missing_ones() {
        let msg = |id: &str, ifname: &str| {
            let pairs = [("CNI_COMMAND", "ADD"), ("CNI_CONTAINERID", id), ("CNI_IFNAME", ifname)];
            let err = check(&pairs).unwrap_err();
            (err.msg, err.details)
        };
        assert_eq!(msg("a/b", "eth0"), ("invalid characters in containerID".into(), "a/b".into()));
        assert_eq!(msg("a", "..").0, "interface name is . or ..");
        assert_eq!(msg("a", "a b").0, "interface name contains / or : or whitespace characters");
        assert_eq!(msg("a", "0123456789abcdef").0, "interface name is too long");
    }

    #[test]
    fn a_template_of_names_is_refused_by_add_alone() {
        for name in ["eth%d", "%", "50%"] {
            let call = |command: &str| {
                let pairs = [("CNI_COMMAND", command), ("CNI_CONTAINERID", "c"), ("CNI_IFNAME", name)];
                check(&[&pairs[..], &[("CNI_NETNS", "/n"), ("CNI_PATH", "/p")]].concat())
            };
            let err = call("ADD").unwrap_err();
            assert_eq!((err.code, err.msg.as_str()), (4, "interface name contains %"));
            assert_eq!(
                err.details,
                format!("CNI_IFNAME: the kernel would take {name:?} for a template of names")
            );
            for command in ["DEL", "CHECK"] {
                assert_eq!(call(command).unwrap().ifname, name, "{command}");
            }
        }
    }

    #[test]
    fn an_unknown_command_is_named() {
        assert_eq!(check(&[("CNI_COMMAND", "add")]).unwrap_err().msg, "unknown CNI_COMMAND: add");
    }
}
