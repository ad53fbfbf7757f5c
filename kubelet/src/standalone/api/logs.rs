//! `logs`: a container's output without the prefixes of CRI's log format, with
//! what was rotated away and is still there.

mod lines;
mod rotated;

use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use inotify::{EventStream, Inotify, WatchMask};
use proto::kubelet::{LogsChunk, LogsRequest};
use tokio::fs::File;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_stream::StreamExt;

use super::Error;
use crate::engine::{ContainerLog, Handle};
use crate::objects::ContainerState;
use crate::store::Store;
use lines::Lines;
use rotated::{FileId, Opened, Position, Rotated, Snapshot};

/// How soon `--follow` notices that its container has ended: that is no write to the log.
const LOOK_FOR_END: Duration = Duration::from_millis(250);

/// How long the next log may take to appear after a rotation.
const NEXT_LOG_TIMEOUT: Duration = Duration::from_secs(1);

/// About so much goes into one answer.
const CHUNK_BYTES: usize = 32 << 10;

type Answers = mpsc::Sender<Result<LogsChunk, Error>>;

/// A log file, and who writes it.
#[derive(Debug)]
pub(super) struct Tail {
    store: Store,
    log: ContainerLog,
    request: LogsRequest,
}

impl Tail {
    pub(super) fn open(store: &Store, engine: &Handle, request: &LogsRequest) -> Result<Self, Error> {
        let LogsRequest { namespace, pod, container, previous, .. } = request;
        let log = engine.container_log(namespace, pod, container, *previous)?;
        Ok(Self { store: store.clone(), log, request: request.clone() })
    }

    /// Sends the log to its end or, following, until its instance of the container ends.
    pub(super) async fn send(self, answers: Answers) {
        let sent = tokio::select! {
            sent = self.copy(&answers) => sent,
            () = answers.closed() => return,
        };
        if let Err(source) = sent {
            let error = Error::ReadLog { path: self.log.path.clone(), source };
            let _receiver_gone = answers.send(Err(error)).await;
        }
    }

    async fn copy(&self, answers: &Answers) -> std::io::Result<()> {
        let (writes, mut snapshot, position) = snapshot(&self.log.path).await?;
        let mut lines = Lines::new(&self.request);
        if let Some(tail) = self.request.tail_lines {
            let skipped;
            (snapshot, skipped) = rotated::blocking(move || {
                let skipped = snapshot.keep_tail(tail)?;
                Ok((snapshot, skipped))
            })
            .await?;
            lines.skip(skipped);
        }
        let Some(mut lines) = snapshot.send_rotated(lines, answers).await? else { return Ok(()) };
        let (log, bytes) = snapshot.into_log()?;
        let log = File::from_std(log);
        if self.request.follow {
            return self.follow(writes, log, position, lines, answers).await;
        }
        send_lines(&mut BufReader::new(log.take(bytes)), &mut Vec::new(), &mut lines, answers).await.map(drop)
    }

    /// Sends `file` and what is written after it, until the instance of the container ends.
    async fn follow(
        &self,
        mut writes: Changes,
        mut file: File,
        mut position: Position,
        mut lines: Lines,
        answers: &Answers,
    ) -> std::io::Result<()> {
        loop {
            let opened = Opened::of(file.try_clone().await?.into_std().await)?;
            let mut log = BufReader::new(file);
            let mut line = Vec::new();
            position = loop {
                let has_ended = !self.is_running();
                // Before the read: what was written until then is in this file.
                let next = position.after(&opened);
                if !send_lines(&mut log, &mut line, &mut lines, answers).await? {
                    return Ok(());
                }
                match next {
                    Ok(Some(next)) => break next,
                    _ if has_ended => return Ok(()),
                    // Between the rename and the new file there is none.
                    _ => {}
                }
                // The end of the wait is a reason to look as good as a write.
                let _elapsed = timeout(LOOK_FOR_END, next_of(&mut writes)).await;
            };
            (writes, file) = loop {
                let (writes, file) = open_when_there(&self.log.path).await?;
                // A slow client may have missed several rotations.
                match position.unread_before(FileId::of(&file.metadata().await?))? {
                    None => break (writes, file),
                    Some(rotated) => {
                        let Some(rest) = rotated::send(Rotated::At(rotated.clone()), lines, answers).await?
                        else {
                            return Ok(());
                        };
                        lines = rest;
                        position = position.after_rotated(rotated);
                    }
                }
            };
        }
    }

    /// Whether the instance that writes this log runs. Another instance of the container, or of a
    /// pod of the same name, writes another log.
    fn is_running(&self) -> bool {
        let Some(pod) = self.store.pod(&self.request.namespace, &self.request.pod) else { return false };
        let status = pod.status.of_container(&self.log.container);
        pod.metadata.uid == self.log.pod_uid
            && status.is_some_and(|status| {
                status.restart_count == self.log.instance
                    && matches!(status.state, ContainerState::Running(_))
            })
    }
}

/// With the changes of the log, and the position before it.
async fn snapshot(path: &Path) -> std::io::Result<(Changes, Snapshot, Position)> {
    loop {
        // The container may be about to start.
        let (writes, file) = open_when_there(path).await?;
        if let Some((snapshot, position)) = Snapshot::of(path, file.into_std().await)? {
            return Ok((writes, snapshot, position));
        }
    }
}

/// What tells of changes of a file; `None` where regular looks have to do: the kernel counts
/// inotify's instances by user, and a pod's root may have taken all of them.
type Changes = Option<EventStream<Vec<u8>>>;

/// The file and its changes. Right after a rotation there is none, until the
/// runtime makes the next one.
async fn open_when_there(path: &Path) -> std::io::Result<(Changes, File)> {
    let until = Instant::now() + NEXT_LOG_TIMEOUT;
    loop {
        let mut beside = watch(path.parent().unwrap_or(path), WatchMask::CREATE | WatchMask::MOVED_TO);
        // Watched before it is read: no write falls in between.
        let writes = watch(path, WatchMask::MODIFY | WatchMask::MOVE_SELF);
        match File::open(path).await {
            Err(error) if error.kind() == ErrorKind::NotFound && Instant::now() < until => {
                let look = until.min(Instant::now() + LOOK_FOR_END);
                let _changed_or_timed_out = timeout_at(look, next_of(&mut beside)).await;
            }
            opened => return opened.map(|file| (writes, file)),
        }
    }
}

fn watch(path: &Path, what: WatchMask) -> Changes {
    let inotify = Inotify::init().ok()?;
    inotify.watches().add(path, what).ok()?;
    inotify.into_event_stream(vec![0; 4096]).ok()
}

/// Ends at the next change, or never.
async fn next_of(changes: &mut Changes) {
    match changes {
        Some(changes) => drop(changes.next().await),
        None => std::future::pending().await,
    }
}

/// Sends every whole line from here on; a line that is still being written
/// stays in `line`. `false` when the client has gone, or has all that it asked for.
async fn send_lines(
    log: &mut (impl AsyncBufRead + Unpin),
    line: &mut Vec<u8>,
    lines: &mut Lines,
    answers: &Answers,
) -> std::io::Result<bool> {
    let mut data = Vec::new();
    while log.read_until(b'\n', line).await? > 0 && line.ends_with(b"\n") {
        lines.push(line, &mut data);
        line.clear();
        if (data.len() > CHUNK_BYTES || lines.are_complete())
            && (answers.send(Ok(LogsChunk { data: std::mem::take(&mut data) })).await.is_err()
                || lines.are_complete())
        {
            return Ok(false);
        }
    }
    Ok(data.is_empty() || answers.send(Ok(LogsChunk { data })).await.is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_log_that_is_just_being_rotated_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("0.log");
        let missing = open_when_there(&log).await.map(drop).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
        let opening = tokio::spawn({
            let log = log.clone();
            async move { open_when_there(&log).await.map(drop) }
        });
        tokio::task::yield_now().await;
        std::fs::write(&log, "").unwrap();
        opening.await.unwrap().unwrap();
    }
}
