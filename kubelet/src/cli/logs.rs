//! `logs`: of one container, or of several.

use std::io::{self, Write};

use jiff::Timestamp;
use proto::kubelet::kubelet_client::KubeletClient;
use proto::kubelet::{LogsChunk, LogsRequest};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tonic::transport::Channel;
use tonic::{Code, Streaming};

use super::failures::Failures;
use super::{Error, client, containers, kinds, watch};
use crate::config::{LogsArgs, Scope, Selection};
use crate::objects::Kind;

/// kubectl's number of lines of each log where a selector chooses the pods.
const LINES_OF_SELECTED: u64 = 10;
/// Pieces of logs that wait for stdout.
const PIECES_KEPT: usize = 16;

pub(super) async fn logs(args: &LogsArgs, out: &mut dyn Write) -> Result<(), Error> {
    let mut kubelet = client::connect(&args.root).await?;
    let requests = requests(&mut kubelet, args).await?;
    match requests.len() {
        0 => {
            return writeln!(io::stderr(), "No resources found in {} namespace.", args.namespace)
                .map_err(Error::Output);
        }
        number if args.follow && number > args.max_log_requests => {
            return Err(Error::TooManyLogs { number, most: args.max_log_requests });
        }
        _ => {}
    }
    let mut failures = Failures::default();
    if args.follow && requests.len() > 1 {
        follow(&kubelet, args, requests, &mut failures, out).await?;
        return failures.result();
    }
    for request in requests {
        let mut lines = Lines::new(&request, args.prefix);
        match kubelet.logs(request).await {
            Ok(chunks) => {
                let mut chunks = chunks.into_inner();
                loop {
                    match chunks.message().await {
                        Ok(Some(chunk)) => lines.write(&chunk.data, out).map_err(Error::Output)?,
                        Ok(None) => break,
                        Err(status) => {
                            failures.add(status.into())?;
                            break;
                        }
                    }
                }
            }
            Err(status) => failures.add(status.into())?,
        }
        lines.finish(out).map_err(Error::Output)?;
    }
    failures.result()
}

/// A request for each log.
async fn requests(kubelet: &mut KubeletClient<Channel>, args: &LogsArgs) -> Result<Vec<LogsRequest>, Error> {
    let namespace = &args.namespace;
    let pods = match (&args.selector, &args.pod) {
        (Some(selector), _) if selector.is_empty() => {
            return Err(Error::Usage("a pod's name or --selector is required"));
        }
        (Some(selector), _) => {
            let selection = Selection { selector: Some(selector.clone()), field_selector: None };
            let scope = Scope { namespace: Some(namespace.clone()), all_namespaces: false };
            client::select(kubelet, Kind::Pod, &scope, &selection).await?
        }
        (None, pod) => {
            let pod = pod.as_deref().unwrap_or_default();
            let name = kinds::pod_name(pod)?;
            match client::get::<Value>(kubelet, Kind::Pod, namespace, name).await {
                Ok(pods) => pods,
                Err(Error::Refused(status)) if status.code() == Code::NotFound => {
                    // The kubelet's own words, which name the namespace.
                    return Ok(vec![request(
                        args,
                        name,
                        args.container_argument.as_deref().unwrap_or(&args.container),
                    )]);
                }
                Err(error) => return Err(error),
            }
        }
    };
    let mut requests = Vec::new();
    for pod in pods {
        let (_, name) = watch::key(&pod);
        let wanted = args.container_argument.as_deref().unwrap_or(&args.container);
        let containers = match wanted {
            _ if args.all_containers => containers::all_of(&pod),
            "" => vec![containers::default_of(&pod)],
            wanted => vec![wanted.to_owned()],
        };
        requests.extend(containers.iter().map(|container| request(args, &name, container)));
    }
    Ok(requests)
}

fn request(args: &LogsArgs, pod: &str, container: &str) -> LogsRequest {
    let since = args.since.since.map(|age| Timestamp::now().saturating_sub(age).unwrap_or(Timestamp::MIN));
    let since = since.or(args.since.since_time);
    LogsRequest {
        namespace: args.namespace.clone(),
        pod: pod.to_owned(),
        container: container.to_owned(),
        follow: args.follow,
        previous: args.previous,
        tail_lines: match args.tail {
            Some(lines) => u64::try_from(lines).ok(),
            None => args.selector.is_some().then_some(LINES_OF_SELECTED),
        },
        since: since.and_then(|time| i64::try_from(time.as_nanosecond()).ok()),
        timestamps: args.timestamps,
        limit_bytes: args.limit_bytes,
    }
}

/// Writes whole lines of all logs, as they come.
async fn follow(
    kubelet: &KubeletClient<Channel>,
    args: &LogsArgs,
    requests: Vec<LogsRequest>,
    failures: &mut Failures,
    out: &mut dyn Write,
) -> Result<(), Error> {
    let (sender, mut received) = mpsc::channel(PIECES_KEPT);
    let mut reading = JoinSet::new();
    for request in requests {
        let mut kubelet = kubelet.clone();
        let (mut lines, sender) = (Lines::new(&request, args.prefix), sender.clone());
        lines.keeps_whole = true;
        reading.spawn(async move {
            let chunks = kubelet.logs(request).await?.into_inner();
            send(chunks, lines, sender).await
        });
    }
    drop(sender);
    while let Some(piece) = received.recv().await {
        out.write_all(&piece).and_then(|()| out.flush()).map_err(Error::Output)?;
    }
    while let Some(read) = reading.join_next().await {
        failures.add_ended(read)?;
    }
    Ok(())
}

async fn send(
    mut chunks: Streaming<LogsChunk>,
    mut lines: Lines,
    sender: mpsc::Sender<Vec<u8>>,
) -> Result<(), Error> {
    let mut piece = Vec::new();
    while let Some(chunk) = chunks.message().await? {
        lines.write(&chunk.data, &mut piece).map_err(Error::Output)?;
        if !piece.is_empty() && sender.send(std::mem::take(&mut piece)).await.is_err() {
            return Ok(());
        }
    }
    lines.finish(&mut piece).map_err(Error::Output)?;
    let _stdout_gone = sender.send(piece).await;
    Ok(())
}

/// One log on its way to stdout.
#[derive(Debug)]
struct Lines {
    /// Before each line; empty: none.
    prefix: String,
    /// A line without its end stays here, so that logs do not mix within a line.
    rest: Vec<u8>,
    keeps_whole: bool,
}

impl Lines {
    /// A line that is longer is written in parts.
    const MOST: usize = 256 << 10;

    fn new(request: &LogsRequest, has_prefix: bool) -> Self {
        let LogsRequest { pod, container, .. } = request;
        let prefix = if has_prefix { format!("[pod/{pod}/{container}] ") } else { String::new() };
        Self { keeps_whole: has_prefix, prefix, rest: Vec::new() }
    }

    fn write(&mut self, bytes: &[u8], out: &mut dyn Write) -> io::Result<()> {
        if !self.keeps_whole {
            return out.write_all(bytes).and_then(|()| out.flush());
        }
        self.rest.extend_from_slice(bytes);
        let end = self.rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        for line in self.rest[..end].split_inclusive(|byte| *byte == b'\n') {
            out.write_all(self.prefix.as_bytes())?;
            out.write_all(line)?;
        }
        self.rest.drain(..end);
        if self.rest.len() > Self::MOST {
            self.finish(out)?;
        }
        out.flush()
    }

    /// Writes what has no end.
    fn finish(&mut self, out: &mut dyn Write) -> io::Result<()> {
        if !self.rest.is_empty() {
            out.write_all(self.prefix.as_bytes())?;
            out.write_all(&std::mem::take(&mut self.rest))?;
            out.write_all(b"\n")?;
        }
        out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_stands_before_each_line_however_the_pieces_are_cut() {
        let request = LogsRequest { pod: "web".into(), container: "c".into(), ..LogsRequest::default() };
        for cut in 1..9 {
            let (mut lines, mut out) = (Lines::new(&request, true), Vec::new());
            for piece in b"one\n\ntwo".chunks(cut) {
                lines.write(piece, &mut out).unwrap();
            }
            lines.finish(&mut out).unwrap();
            let text = String::from_utf8(out).unwrap();
            assert_eq!(text, "[pod/web/c] one\n[pod/web/c] \n[pod/web/c] two\n", "{cut}");
        }
    }
}
