//! Attach: a client's streams are connected with those of a container's first process.
//!
//! The shim passes them on, as it does for [`crate::calls::exec`], and goes on with the container when the client or this
//! runtime has gone.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use proto::cri::AttachRequest;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::calls::exec::{Output, Size, Streams, check_streams, connected, pair, resize, running, write};
use crate::disk::record::new_id;
use crate::error::{Error, Result, chain};
use crate::runtime::Runtime;
use crate::shim::protocol::{Answer, Attach, Call};
use crate::shim_client::error::ShimProblem;
use crate::shim_client::{ANSWER_DEADLINE, ShimClient, unexpected};

/// How long the client may take for what is left when the container has ended.
const LAST_PIECES: Duration = Duration::from_secs(30);

/// Refuses an Attach that cannot be. Returns the container's id.
pub(crate) fn check(runtime: &Runtime, request: &AttachRequest) -> Result<String> {
    check_streams(request.tty, [request.stdin, request.stdout, request.stderr])?;
    Ok(running(runtime, &request.container_id)?.1.id.clone())
}

/// The first size is set after another one, so that a program that fills the terminal draws all of it for the new
/// client. kubectl sends another one too, but of sizes that come at once only the last one counts here.
async fn follow_sizes(shim: Arc<ShimClient>, container: String, mut sizes: watch::Receiver<Option<Size>>) {
    let call = move |Size { width, height }| Call::ResizeContainer {
        container: container.clone(),
        columns: width,
        rows: height,
    };
    if sizes.changed().await.is_err() {
        return;
    }
    let first = *sizes.borrow();
    if let Some(Size { width, height }) = first {
        let other = Size { width: width.saturating_add(1), height: height.saturating_add(1) };
        if let Err(error) = shim.call(call(other)).await {
            tracing::debug!(error = %chain(&error), "the size of a terminal");
        }
    }
    sizes.mark_changed();
    resize(shim, call, sizes).await;
}

/// Forgotten when this is dropped.
struct Expected<'a> {
    runtime: &'a Runtime,
    id: String,
}

impl Drop for Expected<'_> {
    fn drop(&mut self) {
        self.runtime.attachments.forget(&self.id);
    }
}

/// Returns when the container ends, or the client's stdin does; an error if the client takes too little.
pub(crate) async fn attached(
    runtime: &Arc<Runtime>,
    request: &AttachRequest,
    streams: Streams,
) -> Result<()> {
    let Streams { stdin, sizes, output: to } = streams;
    let (sandbox, container) = running(runtime, &request.container_id)?;
    let failed = |source| Error::Attach { container: container.name(), source };
    let shim = sandbox.shim().ok_or(Error::Task { task: "shim" })?;
    if !shim.can_attach() {
        return Err(failed(ShimProblem::CannotAttach));
    }
    let config = &container.record.config;
    // A client may send what the container does not take. That is dropped.
    let stdin = stdin.filter(|_| config.stdin);
    let wants = [stdin.is_some(), request.stdout, request.stderr && !config.tty];
    let (mut ours, mut theirs) = ([None, None, None], Vec::new());
    for (end, _) in ours.iter_mut().zip(wants).filter(|(_, is_wanted)| *is_wanted) {
        let [mine, its] = pair()?;
        *end = Some(connected(mine)?);
        theirs.push(its);
    }
    let [input, stdout, stderr] = ours;
    let id = new_id()?;
    let mut detached = runtime.attachments.expect(&id, &sandbox.id);
    let _expected = Expected { runtime, id: id.clone() };
    let [stdin_wanted, stdout_wanted, stderr_wanted] = wants;
    let call = Call::Attach(Attach {
        attach: id,
        container: container.id.clone(),
        stdin: stdin_wanted,
        stdout: stdout_wanted,
        stderr: stderr_wanted,
    });
    let descriptors: Vec<BorrowedFd<'_>> = theirs.iter().map(AsFd::as_fd).collect();
    match shim.ask(call, &descriptors, ANSWER_DEADLINE).await {
        Ok(Answer::Done) => {}
        Ok(other) => return Err(failed(unexpected(&other))),
        Err(problem) => return Err(failed(problem)),
    }
    drop(theirs);
    // They end with this.
    let mut beside = JoinSet::new();
    if let (Some(pieces), Some(input)) = (stdin, input) {
        beside.spawn(write(input, pieces));
    }
    if let Some(sizes) = sizes {
        beside.spawn(follow_sizes(Arc::clone(&shim), container.id.clone(), sizes));
    }
    let mut output = Output { stdout, stderr };
    let passing_on = async {
        while let Some(piece) = output.next().await {
            if to.send(piece).await.is_err() {
                return; // the client takes no more
            }
        }
    };
    tokio::pin!(passing_on);
    let end = tokio::select! {
        () = &mut passing_on => {
            if to.is_closed() {
                return Ok(());
            }
            detached.await
        }
        end = &mut detached => {
            if matches!(end, Ok(None)) {
                let _or_it_takes_no_more = tokio::time::timeout(LAST_PIECES, passing_on).await;
            }
            end
        }
    };
    match end {
        Ok(None) => Ok(()),
        Ok(Some(why)) => Err(failed(ShimProblem::Detached { why })),
        Err(_lost) => Err(failed(ShimProblem::Ended)),
    }
}
