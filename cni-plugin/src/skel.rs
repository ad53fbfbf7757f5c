//! Runs a verb's function with the process's environment and stdin, and writes to stdout: the only
//! module that uses these streams.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::ExitCode;

use serde_json::Value;

use crate::invocation::Attachment;
use crate::{CniError, CniResult, Command, Environment, Invocation, NetConf, Version, code};

/// A verb that prints nothing on success.
pub type Verb = fn(&Invocation) -> Result<(), CniError>;

/// A plugin and its verbs. A verb without a function succeeds silently, as in the reference.
#[derive(Debug)]
pub struct Plugin {
    pub name: &'static str,
    pub version: &'static str,
    pub add: fn(&Invocation) -> Result<CniResult, CniError>,
    pub del: Verb,
    pub check: Option<Verb>,
    pub status: Option<Verb>,
    pub gc: Option<Verb>,
}

/// Serves the single call of this process. A success exits with 0, with ADD's result on stdout. A
/// failure exits with 1, with the error object on stdout. If ADD's result cannot be written, the
/// plugin's own DEL undoes the ADD.
pub fn run(plugin: &Plugin) -> ExitCode {
    let environment = Environment::from_process();
    if environment.has_no_command() {
        about(plugin);
        return ExitCode::SUCCESS;
    }
    let (text, exit, added) = match serve(plugin, &environment, std::io::stdin()) {
        Ok(answer) => (answer.text, ExitCode::SUCCESS, answer.added),
        Err(error) => (pretty(&with_user(error).to_json()), ExitCode::FAILURE, None),
    };
    let Err(e) = write_stdout(&text) else { return exit };
    warn(plugin.name, format_args!("write stdout: {}", linux::reason(&e)));
    if let Some(Err(e)) = added.map(|call| (plugin.del)(&call)) {
        warn(plugin.name, format_args!("undo the ADD whose result was lost: {}", e.msg));
    }
    ExitCode::FAILURE
}

/// Adds a hint if the kernel refused something and the process is not root.
fn with_user(error: CniError) -> CniError {
    let ends = ["operation not permitted", "permission denied"];
    let is_refused = ends.iter().any(|end| error.msg.ends_with(end));
    match linux::credentials::effective_user() {
        // The delegate has added it already.
        user if user == 0 || !is_refused || error.details.contains(MUST_BE_ROOT) => error,
        user => error.with_details(format_args!("{MUST_BE_ROOT}: this process is user {user}'s")),
    }
}

const MUST_BE_ROOT: &str = "CNI plugins must be started by root";

/// The output of a successful call.
struct Answer {
    text: String,
    /// The ADD to undo if its output cannot be written.
    added: Option<Invocation>,
}

impl Answer {
    fn of(text: String) -> Self {
        Self { text, added: None }
    }
}

fn serve(plugin: &Plugin, environment: &Environment, stdin: impl Read) -> Result<Answer, CniError> {
    let attachment = environment.check()?;
    if attachment.command == Command::Version {
        return Ok(Answer::of(version_info()));
    }
    let conf = NetConf::parse(read(stdin)?)?;
    check_version(attachment.command, conf.cni_version)?;
    check_netns(&attachment)?;
    let call = Invocation::new(attachment, conf);
    match call.command {
        Command::Add => add(plugin, call),
        Command::Del => silent(Some(plugin.del), &call),
        Command::Check => silent(plugin.check, &call),
        Command::Status => silent(plugin.status, &call),
        Command::Gc => silent(plugin.gc, &call),
        Command::Version => Ok(Answer::of(version_info())),
    }
}

fn add(plugin: &Plugin, call: Invocation) -> Result<Answer, CniError> {
    let result = (plugin.add)(&call)?;
    match result.to_json(call.conf.cni_version) {
        Ok(result) => Ok(Answer { text: pretty(&result), added: Some(call) }),
        // The requested version cannot express the result, but the attachment was made.
        Err(cause) => Err(match (plugin.del)(&call) {
            Ok(()) => cause,
            Err(undo) => cause.with_details(format_args!("not rolled back: {}", undo.msg)),
        }),
    }
}

fn silent(verb: Option<Verb>, call: &Invocation) -> Result<Answer, CniError> {
    verb.map_or(Ok(()), |verb| verb(call)).map(|()| Answer::of(String::new()))
}

fn read(mut stdin: impl Read) -> Result<Vec<u8>, CniError> {
    // Most configurations are read by one read(2).
    let mut bytes = Vec::with_capacity(8 * 1024);
    stdin.read_to_end(&mut bytes).map_err(|e| {
        let reason = linux::reason(&e);
        CniError::new(code::IO_FAILURE, format_args!("error reading from stdin: read /dev/stdin: {reason}"))
    })?;
    Ok(bytes)
}

/// CHECK exists since 0.4.0, GC and STATUS since 1.1.0.
fn check_version(command: Command, asked: Version) -> Result<(), CniError> {
    let since = match command {
        Command::Check => Version::V0_4_0,
        Command::Gc | Command::Status => Version::V1_1_0,
        Command::Add | Command::Del | Command::Version => return Ok(()),
    };
    if asked >= since {
        return Ok(());
    }
    let msg = format_args!("config version does not allow {}", command.as_str()).to_string();
    Err(CniError::new(code::INCOMPATIBLE_CNI_VERSION, msg))
}

/// Refuses the host's own namespace as the container's, before anything is changed. (The reference
/// notices it only afterwards.)
fn check_netns(attachment: &Attachment) -> Result<(), CniError> {
    let concerned = matches!(attachment.command, Command::Add | Command::Del);
    if !concerned || attachment.own_netns_allowed || attachment.netns.is_empty() {
        return Ok(());
    }
    // The plugin handles a path that cannot be read: for DEL, a missing one is fine.
    let identity = |path: &Path| std::fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()));
    let theirs = identity(Path::new(&attachment.netns));
    if theirs.is_some() && theirs == identity(Path::new("/proc/thread-self/ns/net")) {
        return Err(CniError::new(
            code::INVALID_NETNS,
            "plugin's netns and netns from CNI_NETNS should not be the same",
        ));
    }
    Ok(())
}

/// One compact line for any requested version, as in the reference.
fn version_info() -> String {
    let supported: Vec<Value> = Version::ALL.iter().map(|version| version.as_str().into()).collect();
    let info = serde_json::json!({ "cniVersion": Version::LATEST.as_str(), "supportedVersions": supported });
    format!("{info}\n")
}

/// Indented by four spaces, without a final newline, as in the reference.
fn pretty(value: &Value) -> String {
    // serde's text has line breaks only between values, and indents by two spaces.
    let narrow = format!("{value:#}");
    let mut text = String::with_capacity(2 * narrow.len());
    for line in narrow.split_inclusive('\n') {
        let indent = line.len() - line.trim_start_matches(' ').len();
        text.extend(std::iter::repeat_n(' ', indent));
        text.push_str(line);
    }
    text
}

/// With one write(2): after a kill, a reader never sees half a document.
fn write_stdout(text: &str) -> std::io::Result<()> {
    if text.is_empty() {
        return Ok(());
    }
    File::from(std::io::stdout().as_fd().try_clone_to_owned()?).write_all(text.as_bytes())
}

/// Writes a non-fatal problem to stderr, since stdout belongs to the protocol.
pub fn warn(plugin: &str, what: impl std::fmt::Display) {
    // A closed stderr is no failure.
    let _no_reader = writeln!(std::io::stderr(), "{plugin}: {what}");
}

fn about(plugin: &Plugin) {
    let versions: Vec<&str> = Version::ALL.iter().map(|version| version.as_str()).collect();
    let text = format!(
        "CNI {} plugin {} (Hawser)\nCNI protocol versions supported: {}\n",
        plugin.name,
        plugin.version,
        versions.join(", ")
    );
    let _no_reader = std::io::stderr().write_all(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLUGIN: Plugin = Plugin {
        name: "test",
        version: "0",
        add: |_| panic!("no work may be done"),
        del: |_| Ok(()),
        check: None,
        status: None,
        gc: Some(|_| Err(CniError::internal("gc ran"))),
    };

    fn call(command: &str, netns: &str, stdin: &str) -> Result<String, CniError> {
        let lookup = |name: &str| {
            let value = match name {
                "CNI_COMMAND" => command,
                "CNI_NETNS" => netns,
                "CNI_NETNS_OVERRIDE" => return None,
                _ => "x",
            };
            Some(value.to_owned())
        };
        serve(&PLUGIN, &Environment::from_lookup(lookup), stdin.as_bytes()).map(|answer| answer.text)
    }

    #[test]
    fn a_stdin_that_cannot_be_read_is_told_in_the_references_words() {
        let error = read(File::open("/").unwrap()).unwrap_err();
        let msg = "error reading from stdin: read /dev/stdin: is a directory";
        assert_eq!((error.code, error.msg.as_str()), (code::IO_FAILURE, msg));
    }

    #[test]
    fn version_ignores_stdin() {
        assert_eq!(
            call("VERSION", "", "garbage").unwrap(),
            "{\"cniVersion\":\"1.1.0\",\"supportedVersions\":[\"0.1.0\",\"0.2.0\",\"0.3.0\",\"0.3.1\",\"0.4.0\",\"1.0.0\",\"1.1.0\"]}\n"
        );
    }

    #[test]
    fn the_plugins_own_namespace_is_refused_before_any_work() {
        let conf = r#"{"name":"n","cniVersion":"1.0.0"}"#;
        for command in ["ADD", "DEL"] {
            let err = call(command, "/proc/self/ns/net", conf).unwrap_err();
            assert_eq!(err.code, 8);
            assert_eq!(err.msg, "plugin's netns and netns from CNI_NETNS should not be the same");
        }
        assert_eq!(call("DEL", "/gone", conf).unwrap(), "");
    }

    #[test]
    fn verbs_are_gated_by_version_and_absent_ones_succeed_silently() {
        let old = r#"{"name":"n","cniVersion":"0.3.1"}"#;
        let new = r#"{"name":"n","cniVersion":"1.1.0"}"#;
        for verb in ["CHECK", "GC", "STATUS"] {
            let err = call(verb, "/gone", old).unwrap_err();
            assert_eq!((err.code, err.msg), (1, format!("config version does not allow {verb}")));
        }
        assert_eq!(call("CHECK", "/gone", new).unwrap(), "");
        assert_eq!(call("STATUS", "/gone", new).unwrap(), "");
        assert_eq!(call("GC", "/gone", new).unwrap_err().msg, "gc ran");
    }

    #[test]
    fn errors_are_indented_by_four_and_have_no_final_newline() {
        let text = pretty(&CniError::new(7, "missing network name").to_json());
        assert_eq!(text, "{\n    \"code\": 7,\n    \"msg\": \"missing network name\"\n}");
    }
}
