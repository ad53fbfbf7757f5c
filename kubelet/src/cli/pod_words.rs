//! kubectl's STATUS and RESTARTS columns of a pod.

use super::age;
use crate::objects::{ContainerState, ContainerStateTerminated, Pod, Time};

/// The STATUS column: the phase, or a more specific reason of a container.
pub(super) fn status(pod: &Pod) -> String {
    let status = &pod.status;
    let mut word =
        if status.reason.is_empty() { status.phase.as_str().to_owned() } else { status.reason.clone() };
    let mut has_running = false;
    // The first container takes precedence, so it comes last.
    for container in status.container_statuses.iter().rev() {
        match &container.state {
            ContainerState::Waiting(waiting) if !waiting.reason.is_empty() => word = waiting.reason.clone(),
            ContainerState::Terminated(ended) => word = end(ended),
            ContainerState::Running(_) if container.ready => has_running = true,
            ContainerState::Waiting(_) | ContainerState::Running(_) => {}
        }
    }
    if word == "Completed" && has_running {
        "Running".clone_into(&mut word);
    }
    if pod.metadata.is_deleted() {
        "Terminating".clone_into(&mut word);
    }
    word
}

fn end(ended: &ContainerStateTerminated) -> String {
    match (ended.reason.as_str(), ended.signal) {
        ("", Some(signal)) => format!("Signal:{signal}"),
        ("", None) => format!("ExitCode:{}", ended.exit_code),
        (reason, _) => reason.to_owned(),
    }
}

/// The RESTARTS column: the count and the time of the last one.
pub(super) fn restarts(pod: &Pod, now: Time) -> String {
    let containers = &pod.status.container_statuses;
    let count: u64 = containers.iter().map(|container| u64::from(container.restart_count)).sum();
    let last = containers.iter().filter_map(|container| match &container.last_state {
        Some(ContainerState::Terminated(ended)) => ended.finished_at,
        _ => None,
    });
    match last.max() {
        Some(last) if count > 0 => format!("{count} ({} ago)", age::since(Some(last), now)),
        Some(_) | None => count.to_string(),
    }
}
