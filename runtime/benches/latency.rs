//! How long each CRI call takes, with the workspace's own CNI plugins:
//! `cargo bench -p runtime`. Needs root, and the static release builds of
//! demo-app, bridge, host-local and loopback.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a report for a person")]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use proto::cri::{StopContainerRequest, StopPodSandboxRequest};
use tests::binaries;
use tests::cri::{Cri, Host, IMAGE, container};

const RUNS: usize = 20;
const PLUGINS: &[&str] = &["bridge", "host-local", "loopback"];

fn main() {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(measure());
}

async fn measure() {
    let mut host = Host::new();
    for plugin in PLUGINS {
        std::fs::copy(binaries::find(plugin).unwrap(), host.path("bin").join(plugin)).unwrap();
    }
    let ipam = format!(
        r#"{{"type":"host-local","subnet":"10.77.0.0/16","routes":[{{"dst":"0.0.0.0/0"}}],"dataDir":"{}"}}"#,
        host.path("leases").display()
    );
    let list = format!(
        r#"{{"cniVersion":"1.0.0","name":"bench","plugins":[{{"type":"bridge","bridge":"bench0","isGateway":true,"ipam":{ipam}}}]}}"#
    );
    std::fs::write(host.path("net.d/10-bench.conflist"), list).unwrap();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let mut times: BTreeMap<&str, Vec<Duration>> = BTreeMap::new();
    for run in 0..=RUNS {
        for (step, time) in one_pod(&host, &mut cri, run).await {
            // The first one makes the bridge and warms the caches.
            if run > 0 {
                times.entry(step).or_default().push(time);
            }
        }
    }
    host.assert_clean();
    println!("{:<28} {:>8} {:>8} {:>8}  (ms, {RUNS} runs)", "call", "median", "min", "max");
    for (step, mut all) in times {
        all.sort();
        let ms = |d: Duration| d.as_secs_f64() * 1000.0;
        println!("{step:<28} {:>8.2} {:>8.2} {:>8.2}", ms(all[RUNS / 2]), ms(all[0]), ms(all[RUNS - 1]));
    }
}

async fn one_pod(host: &Host, cri: &mut Cri, run: usize) -> Vec<(&'static str, Duration)> {
    let mut steps = Vec::new();
    let mut config = host.pod(&format!("pod{run}"));
    config.annotations.clear();
    let first = Instant::now();
    let pod = cri.run_pod(&config).await.unwrap();
    steps.push(("1 RunPodSandbox (bridge)", first.elapsed()));
    let start = Instant::now();
    let id = cri.create(&pod, container("c", &["/demo-app", "sleep", "forever"])).await.unwrap();
    steps.push(("2 CreateContainer", start.elapsed()));
    let start = Instant::now();
    cri.start(&id).await.unwrap();
    steps.push(("3 StartContainer", start.elapsed()));
    steps.push(("1-3 request to execve", first.elapsed()));
    let start = Instant::now();
    cri.runtime.stop_container(StopContainerRequest { container_id: id, timeout: 0 }).await.unwrap();
    steps.push(("4 StopContainer (SIGKILL)", start.elapsed()));
    let start = Instant::now();
    cri.runtime.stop_pod_sandbox(StopPodSandboxRequest { pod_sandbox_id: pod.clone() }).await.unwrap();
    steps.push(("5 StopPodSandbox", start.elapsed()));
    let start = Instant::now();
    cri.remove_pod(&pod).await;
    steps.push(("6 RemovePodSandbox", start.elapsed()));
    steps
}
