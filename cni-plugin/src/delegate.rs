//! Calls another plugin (usually an IPAM plugin) by the exec protocol: same configuration bytes,
//! same environment, different `CNI_COMMAND`.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::Output;

use linux::pipes::{self, Pipes};
use linux::program::{self, NoStatus, Program};
use serde_json::Value;

use crate::{CniError, CniResult, Command, Invocation};

/// A plugin found in `CNI_PATH`.
#[derive(Clone, Debug)]
pub struct Delegate {
    binary: PathBuf,
}

impl Delegate {
    /// Finds the first directory of the path with a regular file named `plugin`.
    pub fn find(plugin: &str, path: &[PathBuf]) -> Result<Self, CniError> {
        if plugin.is_empty() {
            return Err(CniError::internal("no plugin name provided"));
        }
        if plugin.contains('/') {
            return Err(CniError::internal(format_args!("invalid plugin name: {plugin}")));
        }
        if path.is_empty() {
            return Err(CniError::internal("no paths provided"));
        }
        let found = path.iter().map(|dir| dir.join(plugin)).find(|file| file.is_file());
        found.map(|binary| Self { binary }).ok_or_else(|| {
            let dirs: Vec<_> = path.iter().map(|dir| dir.to_string_lossy()).collect();
            CniError::internal(format_args!("failed to find plugin {plugin:?} in path [{}]", dirs.join(" ")))
        })
    }

    /// Starts the program of an ADD and returns at once. The program can do nothing before it gets
    /// its configuration.
    pub fn prepare_add(&self) -> Result<PreparedAdd, CniError> {
        let (running, stdin) = self.launch(Command::Add)?;
        Ok(PreparedAdd { running, stdin })
    }

    /// Calls DEL and waits for its end.
    pub fn del(&self, call: &Invocation) -> Result<(), CniError> {
        self.start(Command::Del, call)?.end()
    }

    /// Calls CHECK and waits for its end.
    pub fn check(&self, call: &Invocation) -> Result<(), CniError> {
        self.start(Command::Check, call)?.end()
    }

    /// Calls STATUS and waits for its end.
    pub fn status(&self, call: &Invocation) -> Result<(), CniError> {
        self.start(Command::Status, call)?.end()
    }

    /// Calls GC and waits for its end.
    pub fn gc(&self, call: &Invocation) -> Result<(), CniError> {
        self.start(Command::Gc, call)?.end()
    }

    fn start(&self, command: Command, call: &Invocation) -> Result<Running, CniError> {
        let (running, stdin) = self.launch(command)?;
        running.configure(stdin, call)
    }

    /// Returns the program, and the pipe to its stdin.
    fn launch(&self, command: Command) -> Result<(Running, OwnedFd), CniError> {
        Running::start(&self.binary, command).map_err(|e| failed(&self.binary, "start", &e))
    }
}

/// An ADD that waits for its configuration, while another CPU wakes up for it. If it is dropped, it
/// is killed and has done nothing.
#[derive(Debug)]
#[must_use]
pub struct PreparedAdd {
    running: Running,
    stdin: OwnedFd,
}

impl PreparedAdd {
    /// Starts it and returns at once, so that the caller can work meanwhile.
    pub fn start(self, call: &Invocation) -> Result<PendingAdd, CniError> {
        Ok(PendingAdd { running: self.running.configure(self.stdin, call)? })
    }
}

/// An ADD in progress. If it is dropped without [`PendingAdd::confirm`], its output is closed and
/// the drop waits for its end.
#[derive(Debug)]
#[must_use]
pub struct PendingAdd {
    running: Running,
}

impl PendingAdd {
    /// The result as soon as it is written; only [`PendingAdd::confirm`] shows whether the plugin
    /// succeeds. The error of a failed plugin is returned unchanged.
    pub fn result(&mut self, call: &Invocation) -> Result<CniResult, CniError> {
        self.running.read_until(is_result)?;
        if !is_result(self.running.stdout()) {
            self.running.end()?;
        }
        let value: Value = serde_json::from_slice(self.running.stdout()).map_err(|e| {
            CniError::internal(format_args!("failed to unmarshal raw result: {e}"))
                .with_details(self.running.binary.display())
        })?;
        // The reference accepts "null" as an empty result.
        let value = if value.is_null() { Value::Object(serde_json::Map::new()) } else { value };
        CniResult::from_json(&value, call.conf.cni_version)
    }

    /// Whether it has failed with an error object: then it holds nothing for this call.
    pub fn has_refused(&self) -> bool {
        self.running.refused
    }

    /// Waits for its end. It must succeed, and add nothing to the result.
    pub fn confirm(mut self) -> Result<(), CniError> {
        let length = self.running.stdout().len();
        self.running.end()?;
        let more = self.running.stdout().get(length..).unwrap_or_default();
        if more.iter().all(u8::is_ascii_whitespace) {
            return Ok(());
        }
        let more = String::from_utf8_lossy(more);
        Err(CniError::internal(format_args!("failed to unmarshal raw result: {more:?} after its end"))
            .with_details(self.running.binary.display()))
    }
}

/// Whether it is a complete document and not an error object.
fn is_result(stdout: &[u8]) -> bool {
    let document = serde_json::from_slice::<Value>(stdout);
    document.is_ok_and(|value| value.as_object().is_some_and(|object| !object.contains_key("code")))
}

#[derive(Debug)]
struct Running {
    program: Program,
    /// It has no configuration yet, so it has done nothing.
    waiting: bool,
    /// stdout and stderr; `None` after waiting for the child.
    outputs: Option<Pipes<2>>,
    /// The complete output.
    texts: [Vec<u8>; 2],
    /// It has failed with an error object.
    refused: bool,
    binary: PathBuf,
}

impl Running {
    /// Returns the process, and the pipe to its stdin.
    fn start(binary: &Path, command: Command) -> io::Result<(Self, OwnedFd)> {
        let path = CString::new(binary.as_os_str().as_bytes())?;
        let (stdin, to_stdin) = pipes::pipe()?;
        let (from_stdout, stdout) = pipes::pipe()?;
        let (from_stderr, stderr) = pipes::pipe()?;
        let program = program::start(path, environment(command), [stdin, stdout, stderr])?;
        let outputs = Some(Pipes::new([from_stdout, from_stderr]));
        let texts = [const { Vec::new() }; 2];
        let binary = binary.to_owned();
        Ok((Self { program, waiting: true, outputs, texts, refused: false, binary }, to_stdin))
    }

    /// Writes the configuration; the plugin begins once it has read all of it.
    fn configure(mut self, stdin: OwnedFd, call: &Invocation) -> Result<Self, CniError> {
        self.waiting = false;
        // A plugin reads its whole stdin before it writes (almost) anything, so a configuration
        // that fits into the pipe needs no wait. If a plugin ends without reading it, its exit
        // status says more than EPIPE.
        pipes::make_room(&stdin, call.conf.stdin.len());
        match File::from(stdin).write_all(&call.conf.stdin) {
            Err(e) if e.kind() != io::ErrorKind::BrokenPipe => {
                Err(failed(&self.binary, "write configuration to", &e))
            }
            _ => Ok(self),
        }
    }

    fn stdout(&self) -> &[u8] {
        let [stdout, _] = self.outputs.as_ref().map_or(&self.texts, Pipes::texts);
        stdout
    }

    fn read_until(&mut self, enough: fn(&[u8]) -> bool) -> Result<(), CniError> {
        let Some(outputs) = &mut self.outputs else { return Ok(()) };
        let read = outputs.read_until(|[stdout, _]| enough(stdout));
        read.map_err(|e| failed(&self.binary, "read output of", &e))
    }

    /// Waits for its end. After a success, its stderr is copied to ours.
    fn end(&mut self) -> Result<(), CniError> {
        let Some(mut outputs) = self.outputs.take() else { return Ok(()) };
        let read = outputs.read_until(|_| false);
        self.texts = outputs.texts().clone();
        // It ends: its output was read to the end, or the pipes are closed now.
        drop(outputs);
        let status = self.program.wait().map_err(|e| match e {
            NoStatus::NotStarted(cause) => failed(&self.binary, "start", &cause),
            NoStatus::NotWaitedFor(cause) => failed(&self.binary, "wait for", &cause),
        })?;
        read.map_err(|e| failed(&self.binary, "read output of", &e))?;
        let [stdout, stderr] = &self.texts;
        if status.success() {
            // Only information: a closed stderr is no failure.
            let _no_reader = std::io::stderr().write_all(stderr);
            return Ok(());
        }
        let output = Output { status, stdout: stdout.clone(), stderr: stderr.clone() };
        let said = error_object(&output);
        self.refused = status.code().is_some() && matches!(said, Ok(Some(_)));
        Err(error_of(&output, said))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.waiting {
            self.program.kill();
        }
        // Closed before the wait, so that the program does not wait for a reader.
        drop(self.outputs.take());
    }
}

/// Our own environment with another command.
fn environment(command: Command) -> Vec<CString> {
    const COMMAND: &str = "CNI_COMMAND";
    let ours = std::env::vars_os().filter(|(name, _)| name != COMMAND);
    let words = ours.map(|(mut word, value)| {
        word.push("=");
        word.push(value);
        word.into_vec()
    });
    let words = words.chain([format!("{COMMAND}={}", command.as_str()).into_bytes()]);
    // None has a zero byte: they are C strings.
    words.filter_map(|word| CString::new(word).ok()).collect()
}

/// The error object of a plugin that failed; `None` if it wrote a result or nothing. The `Err`
/// explains any other output.
fn error_object(output: &Output) -> Result<Option<CniError>, String> {
    if output.stdout.is_empty() {
        return Ok(None);
    }
    let value: Value = serde_json::from_slice(&output.stdout).map_err(|e| e.to_string())?;
    let error = CniError::from_json(&value).map_err(|e| e.msg)?;
    Ok((error.code != 0 || !error.msg.is_empty()).then_some(error))
}

fn error_of(output: &Output, said: Result<Option<CniError>, String>) -> CniError {
    let stdout = String::from_utf8_lossy(&output.stdout);
    match said {
        Ok(Some(error)) => error,
        Ok(None) if output.stdout.is_empty() => match String::from_utf8_lossy(&output.stderr) {
            stderr if stderr.is_empty() => no_error_message(output),
            stderr => CniError::internal(format_args!("netplugin failed: {stderr:?}")),
        },
        // A result: the plugin was killed after it had written it.
        Ok(None) => no_error_message(output).with_details(format_args!("its output was {stdout:?}")),
        Err(e) => CniError::internal(format_args!(
            "netplugin failed but error parsing its diagnostic message {stdout:?}: {e}"
        )),
    }
}

/// `exit status: 1` or `signal: 9 (SIGKILL)`.
fn no_error_message(output: &Output) -> CniError {
    CniError::internal(format_args!("netplugin failed with no error message: {}", output.status))
}

fn failed(binary: &Path, what: &str, cause: &io::Error) -> CniError {
    CniError::internal(format_args!("{what} plugin {}: {}", binary.display(), linux::reason(cause)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    fn output(status: i32, stdout: &str, stderr: &str) -> Output {
        Output {
            status: std::process::ExitStatus::from_raw(status << 8),
            stdout: stdout.into(),
            stderr: stderr.into(),
        }
    }

    #[test]
    fn only_a_regular_file_in_the_path_is_a_plugin() {
        let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::create_dir(first.path().join("host-local")).unwrap();
        let path = [first.path().to_owned(), second.path().to_owned()];
        let msg = |plugin: &str, path: &[PathBuf]| Delegate::find(plugin, path).unwrap_err().msg;
        let expected = format!(
            "failed to find plugin \"host-local\" in path [{} {}]",
            first.path().display(),
            second.path().display()
        );
        assert_eq!(msg("host-local", &path), expected);
        assert_eq!(msg("../x", &path), "invalid plugin name: ../x");
        assert_eq!(msg("", &path), "no plugin name provided");
        assert_eq!(msg("x", &[]), "no paths provided");

        std::fs::write(second.path().join("host-local"), "").unwrap();
        assert_eq!(Delegate::find("host-local", &path).unwrap().binary, second.path().join("host-local"));
    }

    #[test]
    fn an_add_that_never_begins_is_ended() {
        // A shell whose script has not come: killed, though its stdin is still open.
        let prepared = Delegate { binary: "/bin/sh".into() }.prepare_add().unwrap();
        let kept = prepared.stdin.try_clone().unwrap();
        let pid = prepared.running.program.id();
        drop(prepared);
        assert!(!Path::new(&format!("/proc/{pid}")).exists(), "{pid}");
        assert_eq!(File::from(kept).write(b"x").unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    fn error_of(output: &Output) -> CniError {
        super::error_of(output, error_object(output))
    }

    #[test]
    fn a_delegates_error_keeps_code_message_and_details() {
        let err = error_of(&output(1, r#"{"code":11,"msg":"later","details":"busy"}"#, "noise"));
        assert_eq!(err, CniError::new(11, "later").with_details("busy"));
    }

    #[test]
    fn a_delegate_without_error_object_is_described_by_what_it_left() {
        assert_eq!(error_of(&output(1, "", "boom\n")).msg, r#"netplugin failed: "boom\n""#);
        assert_eq!(
            error_of(&output(1, "", "")).msg,
            "netplugin failed with no error message: exit status: 1"
        );
        let killed = error_of(&output(1, r#"{"cniVersion":"1.0.0"}"#, ""));
        assert_eq!(killed.msg, "netplugin failed with no error message: exit status: 1");
        assert_eq!(killed.code, 999);
        let err = error_of(&output(1, "not json", ""));
        assert!(
            err.msg.starts_with(r#"netplugin failed but error parsing its diagnostic message "not json": "#)
        );
    }
}
