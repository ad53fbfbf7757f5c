//! `top`: what containers have used, as the runtime counts it, and the node, as the kernel does.

use std::io;

use proto::cri;
use proto::kubelet::UsageResponse;
use proto::kubelet::usage_response::{Container, Figures};

use super::Error;
use crate::clients::cri::{CONTAINER_NAME_LABEL, POD_UID_LABEL};
use crate::engine::{Handle, StreamError};
use crate::node::machine;

const PROCESSORS: &str = "/proc/stat";
const MEMORY: &str = "/proc/meminfo";

pub(super) async fn usage(engine: &Handle) -> Result<UsageResponse, Error> {
    let runtime = engine.runtime().await.map_err(Error::Streams)?;
    let stats = runtime.container_stats(None).await;
    let stats = stats.map_err(|error| Error::Streams(StreamError::Runtime(error)))?;
    let node = node()?;
    Ok(UsageResponse { containers: stats.into_iter().filter_map(container).collect(), node: Some(node) })
}

/// `None`: not of a pod, or without figures yet.
fn container(stats: cri::ContainerStats) -> Option<Container> {
    let labels = stats.attributes?.labels;
    let (cpu, memory) = (stats.cpu?, stats.memory?);
    Some(Container {
        pod: labels.get(POD_UID_LABEL)?.clone(),
        name: labels.get(CONTAINER_NAME_LABEL)?.clone(),
        figures: Some(Figures {
            processor: cpu.usage_core_nano_seconds?.value,
            time: cpu.timestamp,
            working_set: memory.working_set_bytes?.value,
        }),
    })
}

fn node() -> Result<Figures, Error> {
    let read = |path: &'static str| {
        std::fs::read_to_string(path).map_err(|source| Error::ReadUsage { path, source })
    };
    let malformed = |path| Error::ReadUsage { path, source: io::ErrorKind::InvalidData.into() };
    let processor = machine::processor_time(&read(PROCESSORS)?).ok_or_else(|| malformed(PROCESSORS))?;
    let working_set = used_memory(&read(MEMORY)?).ok_or_else(|| malformed(MEMORY))?;
    let time = i64::try_from(jiff::Timestamp::now().as_nanosecond()).unwrap_or(i64::MAX);
    Ok(Figures { processor, time, working_set })
}

/// What is neither free nor given back on demand, in bytes.
fn used_memory(text: &str) -> Option<u64> {
    Some(machine::memory(text, "MemTotal")?.saturating_sub(machine::memory(text, "MemAvailable")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_is_read_as_the_kernel_writes_it() {
        let text = "MemTotal:        8000 kB\nMemFree:         100 kB\nMemAvailable:   6000 kB\n";
        assert_eq!(used_memory(text), Some(2000 * 1024));
        assert!(node().unwrap().processor > 0);
    }
}
