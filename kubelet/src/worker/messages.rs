//! Termination messages: a container's termination log, or the end of its output if its policy says
//! so.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;

use proto::cri::{ContainerState, ContainerStatus};

use super::Tools;
use crate::logs::{log_directory, log_path};
use crate::objects::{Pod, TerminationMessagePolicy};
use crate::pod_state::observed::{Observed, instance_of, name_of};

const MAX_MESSAGE: u64 = 4096;
/// All messages of a pod together (`MaxPodTerminationMessageLogLength`): each container has the same share.
const MAX_OF_POD: usize = 12 << 10;
const MAX_FROM_LOG: usize = 2048;
const MAX_LINES: usize = 80;

/// The message of each ended container of a pod, read once.
#[derive(Debug, Default)]
pub(super) struct Messages(BTreeMap<String, String>);

impl Messages {
    pub(super) fn by_container_id(&self) -> &BTreeMap<String, String> {
        &self.0
    }

    /// Reads the messages of newly ended containers. A container that blocks the read gets no
    /// message; the others wait for the next call, so that a call waits at most once.
    pub(super) async fn read_new(&mut self, tools: &Tools, pod: &Pod, observed: &Observed) {
        self.0.retain(|id, _| observed.containers.iter().any(|c| c.id == *id));
        let ended = observed.containers.iter().filter(|c| c.state() == ContainerState::ContainerExited);
        let unread: Vec<_> = ended.filter(|container| !self.0.contains_key(&container.id)).collect();
        for container in unread {
            let Some(logged) = termination_log(tools, pod, container).await else { continue };
            let is_late = logged.as_ref().is_err_and(|error| error.kind() == ErrorKind::TimedOut);
            let message = message(tools, pod, container, logged.unwrap_or_default());
            self.0.insert(container.id.clone(), message);
            if is_late {
                tracing::warn!(
                    pod = pod.metadata.name,
                    container = name_of(container),
                    "termination message not read in time"
                );
                return;
            }
        }
    }
}

/// `None` if the pod has no such container.
async fn termination_log(
    tools: &Tools,
    pod: &Pod,
    container: &ContainerStatus,
) -> Option<std::io::Result<String>> {
    let name = name_of(container);
    pod.spec.container_named(name)?;
    let uid = &pod.metadata.uid;
    let path = tools.own_files(uid, name, instance_of(container)).termination_log;
    Some(tools.file_work.run(uid, move || tail(&path)).await)
}

/// `logged` is the end of the termination log.
fn message(tools: &Tools, pod: &Pod, container: &ContainerStatus, logged: String) -> String {
    let (name, instance) = (name_of(container), instance_of(container));
    let falls_back = pod.spec.container_named(name).is_some_and(|spec| {
        spec.termination_message_policy == TerminationMessagePolicy::FallbackToLogsOnError
    });
    let message = if logged.is_empty() && falls_back && container.exit_code != 0 {
        tail_of_log(&log_directory(&tools.log_dir, &pod.metadata).join(log_path(name, instance)))
    } else {
        logged
    };
    share(message, pod.spec.containers.len() + pod.spec.init_containers.len())
}

/// The beginning of a message, as long as one of `containers` may have it.
fn share(mut message: String, containers: usize) -> String {
    message.truncate(message.floor_char_boundary(MAX_OF_POD / containers.max(1)));
    message
}

/// The last bytes of a file.
fn tail(path: &Path) -> std::io::Result<String> {
    let (mut bytes, mut file) = (Vec::new(), linux::shared_file::open(path)?);
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(MAX_MESSAGE)))?;
    file.take(MAX_MESSAGE).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn tail_of_log(path: &Path) -> String {
    // A CRI prefix takes about 40 bytes per line; four times the limit is enough.
    let window = MAX_FROM_LOG as u64 * 4;
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(window)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    last_lines(&String::from_utf8_lossy(&read().unwrap_or_default()))
}

/// The text of the last lines, without CRI prefixes (`time stream P|F `).
fn last_lines(log: &str) -> String {
    let lines: Vec<&str> = log.lines().filter_map(|line| line.splitn(4, ' ').nth(3)).collect();
    let start = lines.len().saturating_sub(MAX_LINES);
    let text: String = lines[start..].iter().flat_map(|line| [*line, "\n"]).collect();
    let mut cut = text.len().saturating_sub(MAX_FROM_LOG);
    while !text.is_char_boundary(cut) {
        cut += 1;
    }
    text[cut..].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_gives_its_last_lines_without_cri_prefixes() {
        let log = "2026-11-20T17:53:02.596223978Z stdout F first\n\
                   2026-11-20T17:53:03.596223978Z stderr F it broke here\n";
        assert_eq!(last_lines(log), "first\nit broke here\n");
        assert_eq!(last_lines(&"t stdout F x\n".repeat(200)).lines().count(), MAX_LINES);
    }

    #[test]
    fn the_end_of_a_long_file_counts_and_the_containers_of_a_pod_share_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        std::fs::write(&path, format!("{}the end", "x".repeat(5000))).unwrap();
        let read = tail(&path).unwrap();
        assert!(read.len() == 4096 && read.ends_with("xthe end"), "{} bytes", read.len());
        std::fs::write(&path, "short").unwrap();
        assert_eq!(tail(&path).unwrap(), "short");
        assert_eq!(share("x".repeat(4096), 3).len(), 4096);
        assert_eq!(share("x".repeat(4096), 4).len(), 3072);
        assert_eq!(share("\u{fffd}".repeat(4096), 12), "\u{fffd}".repeat(341));
    }
}
