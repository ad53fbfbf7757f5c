//! The client commands, with kubectl's names, output and exit codes.

mod age;
mod apply;
mod attach;
mod client;
mod completion;
mod containers;
mod cp;
mod delete;
mod describe;
mod events;
mod exec;
mod failures;
mod files;
mod get;
mod kinds;
mod logs;
mod pod_words;
mod port_forward;
mod printable;
mod printer;
mod program;
mod remote_command;
mod rows;
mod snapshot_rows;
mod stop;
mod streams;
mod table;
mod tables;
mod top;
mod wait;
mod watch;
mod yaml;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use crate::clients::unix_channel::text;
use crate::command_line::called_as::how_to_start;
use crate::config::{Cli, ClientCommand, Command};
use crate::run;

/// What ended a connection.
type StreamProblem = Box<dyn std::error::Error + Send + Sync>;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Run(#[from] run::Error),
    #[error("no hawser-kubelet answers at {}: {}", socket.display(), how_to_start())]
    NoKubelet { socket: PathBuf },
    #[error("permission denied at {}: run this command as root", socket.display())]
    NotAllowed { socket: PathBuf },
    #[error("connect to {}", socket.display())]
    Connect {
        socket: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("start the client")]
    Client(#[source] io::Error),
    /// The kubelet refused the call; users read its message.
    #[error("{}", .0.message())]
    Refused(#[source] Box<tonic::Status>),
    #[error("the server doesn't have a resource type {kind:?}")]
    UnknownKind { kind: String },
    #[error("the server doesn't have a resource type {kind:?}: {instead}")]
    Workload { kind: String, instead: &'static str },
    #[error("{0}")]
    Usage(&'static str),
    #[error("the path {:?} does not exist", path.display().to_string())]
    NoFile { path: PathBuf },
    #[error("read {}", path.display())]
    ReadFile {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("error reading [{}]: recognized file extensions are [.json .yaml .yml]", dir.display())]
    NoManifests { dir: PathBuf },
    #[error("{} has more than {limit} {of}, the limit", dir.display())]
    LargeDirectory { dir: PathBuf, limit: usize, of: &'static str },
    #[error("{}", mistakes.join("\n"))]
    Manifest { mistakes: Vec<String> },
    #[error("the kubelet's reply is not an object of this version")]
    Answer(#[source] serde_json::Error),
    #[error("connect to {url}")]
    Streams {
        url: String,
        #[source]
        source: io::Error,
    },
    #[error("the connection to the program was lost")]
    Stream(#[source] StreamProblem),
    #[error("set up the terminal")]
    Terminal(#[source] io::Error),
    #[error("{message}")]
    Exec { message: String },
    #[error("command terminated with exit code {code}")]
    Exited { code: u8 },
    #[error("listen on port {port}")]
    Listen {
        port: u16,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Selector(crate::command_line::selectors::UnknownField),
    #[error("error executing jsonpath")]
    Template(#[source] crate::command_line::jsonpath::Error),
    /// kubectl's words.
    #[error("timed out waiting for the condition on {subject}")]
    TimedOut { subject: String },
    #[error("the copy takes longer than {seconds} s (--timeout)")]
    CopyTakesTooLong { seconds: f64 },
    #[error("condition not met for {subject}")]
    NotMet { subject: String },
    #[error("the kubelet ended")]
    KubeletEnds,
    #[error(
        "you are attempting to follow {number} log streams, but maximum allowed concurrency is {most}, \
         use --max-log-requests to increase the limit"
    )]
    TooManyLogs { number: usize, most: usize },
    #[error("{} doesn't exist in local filesystem", path.display())]
    NoSource { path: PathBuf },
    #[error("write {}", path.display())]
    WriteFile {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("read the container's archive")]
    Archive(#[source] io::Error),
    #[error("tar contents corrupted: {problem}")]
    Corrupt { problem: String },
    #[error("container {container} of pod {pod} cannot run tar, which cp needs there: {message}")]
    NoTar { pod: String, container: String, message: String },
    #[error("{program} in the container has neither read nor written anything for {seconds} s")]
    Stalled { program: String, seconds: u64 },
    #[error("a part of the command failed")]
    Task(#[source] tokio::task::JoinError),
    #[error("write to stdout")]
    Output(#[source] io::Error),
    #[error("wait for the kubelet to exit")]
    WaitForEnd(#[source] linux::Error),
}

impl From<tonic::Status> for Error {
    fn from(status: tonic::Status) -> Self {
        Self::Refused(Box::new(status))
    }
}

/// Runs a command; errors go to stderr.
pub fn execute(cli: Cli) -> ExitCode {
    let result = match cli.command {
        Command::Run(args) => run::run(*args).map_err(Error::from),
        Command::Client(command) => execute_client(*command),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // A closed pipe is not a failure: `hawser-kubelet get … | head`.
        Err(Error::Output(cause)) if cause.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            let code = if let Error::Exited { code } = error { code.into() } else { ExitCode::FAILURE };
            let _no_reader = writeln!(io::stderr(), "{}", printable::printable(&describe_error(&error)));
            code
        }
    }
}

fn execute_client(command: ClientCommand) -> Result<(), Error> {
    let threads =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::Client)?;
    let answered = threads.block_on(ask(command, &mut io::stdout().lock()));
    // A read of stdin that has not ended must not hold the command up.
    threads.shutdown_background();
    answered
}

async fn ask(command: ClientCommand, out: &mut dyn Write) -> Result<(), Error> {
    match command {
        ClientCommand::Apply(args) => apply::apply(&args, out).await,
        ClientCommand::Get(args) => get::get(&args, out).await,
        ClientCommand::Describe(args) => describe::describe(&args, out).await,
        ClientCommand::Logs(args) => logs::logs(&args, out).await,
        ClientCommand::Exec(args) => exec::exec(&args, out).await,
        ClientCommand::Attach(args) => attach::attach(&args, out).await,
        ClientCommand::PortForward(args) => port_forward::port_forward(&args, out).await,
        ClientCommand::Events(args) => events::events(&args, out).await,
        ClientCommand::Wait(args) => wait::wait(&args, out).await,
        ClientCommand::Top(args) => top::top(&args, out).await,
        ClientCommand::Cp(args) => cp::cp(&args).await,
        ClientCommand::Completion(args) => completion::completion(&args, out),
        ClientCommand::Delete(args) => delete::delete(&args, out).await,
        ClientCommand::Stop(args) => stop::stop(&args, out).await,
    }
}

/// Uses kubectl's two prefixes for errors.
fn describe_error(error: &Error) -> String {
    match error {
        Error::Refused(status) if status.code() == tonic::Code::NotFound => {
            format!("Error from server (NotFound): {}", status.message())
        }
        Error::Refused(status) if status.message().is_empty() => {
            format!("error: the kubelet ended before it answered ({})", status.code())
        }
        Error::Exited { code } => format!("command terminated with exit code {code}"),
        // The message is the status text already; its source would repeat it.
        // Not the kubelet's own answer: it ended meanwhile, for example.
        Error::Refused(status) if std::error::Error::source(&**status).is_some() => {
            format!("error: the connection to hawser-kubelet was lost ({}): {}", text(status), how_to_start())
        }
        Error::Refused(status) => format!("error: {}", status.message()),
        other => format!("error: {}", linux::chain(other)),
    }
}

#[cfg(test)]
mod tests;
