//! `hawser-kubelet get pods -w` as one process beside the pods that are measured. A client for each look would take
//! processor time from them.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::Instant;

use ::tests::Node;
use ::tests::node::TIMEOUT;
use anyhow::{Context, Result, bail};
use xtask::progress::complain;

/// Dropping it ends the client.
#[derive(Debug)]
pub(super) struct PodWatch {
    client: Child,
    /// As `get` prints them.
    rows: Receiver<String>,
}

impl PodWatch {
    pub(super) fn start(node: &Node<'_>) -> Result<Self> {
        let mut command = node.client_command(&["get", "pods", "-n", "default", "--no-headers", "-w"])?;
        let mut client = command.stdout(Stdio::piped()).spawn().context("start hawser-kubelet get -w")?;
        let printed = BufReader::new(client.stdout.take().context("it has a piped stdout")?);
        let (send, rows) = mpsc::channel();
        thread::spawn(move || printed.lines().map_while(Result::ok).try_for_each(|row| send.send(row)));
        Ok(Self { client, rows })
    }

    /// Until the pod's only container has ended with exit code 0.
    pub(super) fn wait_until_completed(&self, pod: &str) -> Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let row = self.rows.recv_timeout(left).with_context(|| format!("{pod} has not completed"))?;
            let mut columns = row.split_whitespace();
            if columns.next() != Some(pod) {
                continue;
            }
            match columns.nth(1) {
                Some("Completed") => return Ok(()),
                Some("Error") => bail!("{row}"),
                _ => {}
            }
        }
    }
}

impl Drop for PodWatch {
    fn drop(&mut self) {
        let ended = self.client.kill().and_then(|()| self.client.wait());
        if let Err(error) = ended {
            complain(&format!("end hawser-kubelet get -w: {error}"));
        }
    }
}
