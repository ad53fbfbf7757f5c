//! Further programs in containers that end meanwhile, that have groups of their own, and too many of them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use proto::cri::StopContainerRequest;
use tests::cri::{Host, container, eventually, eventually_within};

use super::exec::{children, exec, running, sleeping};

/// For what a thousand processes do.
const SLOWLY: Duration = Duration::from_secs(120);

/// What a process's descriptors are open on.
fn open_files(pid: i32) -> Vec<PathBuf> {
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    // One that is closed meanwhile has no link.
    descriptors.filter_map(|one| std::fs::read_link(one.unwrap().path()).ok()).collect()
}

/// Peak of a process's resident memory, in bytes.
pub(crate) fn peak_memory(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
}

#[tokio::test]
async fn an_exec_into_a_container_that_ends_meanwhile_names_it_and_leaves_nothing() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let (pod, first) = running(&host, &mut cri).await;
    let stop = StopContainerRequest { container_id: first.clone(), timeout: 0 };
    cri.runtime.stop_container(stop).await.unwrap();
    let shim = host.shims()[0];
    let is_of_first = |file: &PathBuf| file.iter().any(|name| name == first.as_str());
    let before = eventually("the files of the first container are closed", || {
        let open = open_files(shim);
        (!open.iter().any(is_of_first)).then_some(open.len())
    })
    .await;
    for round in 0..20 {
        let config = container(&format!("c{round}"), &["/demo-app", "sleep", "forever"]);
        let id = cri.create(&pod, config).await.unwrap();
        cri.start(&id).await.unwrap();
        let mut asking = tokio::task::JoinSet::new();
        let (answered, mut answers) = tokio::sync::mpsc::unbounded_channel();
        for _ in 0..4 {
            let (cri, id, answered) = (host.connect().await, id.clone(), answered.clone());
            asking.spawn(async move {
                loop {
                    match exec(&cri, &id, &["/demo-app", "print", "x"], 0).await {
                        // The second one was killed with its container.
                        Ok(ended) => {
                            assert!([0, 137].contains(&ended.exit_code), "{ended:?}");
                            answered.send(()).unwrap();
                        }
                        Err(refused) => {
                            // The name if the shim has refused it, the id if the runtime has.
                            let is_named = [&id, &format!("exec in container c{round}: ")];
                            assert!(is_named.iter().any(|is| refused.message().contains(*is)), "{refused}");
                            return;
                        }
                    }
                }
            });
        }
        // Each round after another number of them.
        for _ in 0..round {
            answers.recv().await.unwrap();
        }
        let stop = StopContainerRequest { container_id: id.clone(), timeout: 0 };
        cri.runtime.stop_container(stop).await.unwrap();
        while let Some(ended) = asking.join_next().await {
            ended.unwrap();
        }
    }
    eventually("no child is left", || children(&host).is_empty().then_some(())).await;
    eventually("no descriptor is left", || (open_files(shim).len() == before).then_some(())).await;
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

/// The group of the container itself must have no processes then.
#[tokio::test]
async fn a_further_program_joins_the_group_in_which_the_container_has_its_processes() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let (pod, id) = running(&host, &mut cri).await;
    let first = children(&host)[0];
    let mounts = linux::mountinfo::read().unwrap();
    let unified = mounts.into_iter().find(|m| m.fs_type == "cgroup2" && m.root == Path::new("/"));
    let root = unified.expect("this test needs a cgroup2 mount").mount_point;
    let own = group_of(first);
    let controllers = std::fs::read_to_string(root.join("cgroup.controllers")).unwrap();
    let controller =
        controllers.split_whitespace().next().expect("this test needs a controller of cgroup v2");
    let inner = root.join(own.strip_prefix("/").unwrap()).join("inner");
    std::fs::create_dir(&inner).unwrap();
    std::fs::write(inner.join("cgroup.procs"), first.to_string()).unwrap();
    let mut dir = root;
    for name in own.strip_prefix("/").unwrap() {
        std::fs::write(dir.join("cgroup.subtree_control"), format!("+{controller}")).unwrap();
        dir.push(name);
    }
    std::fs::write(dir.join("cgroup.subtree_control"), format!("+{controller}")).unwrap();

    let said = exec(&cri, &id, &["/demo-app", "print", "x"], 10).await.unwrap();
    assert_eq!((said.stdout.as_slice(), said.exit_code), (&b"x\n"[..], 0));
    let waiting = sleeping(&cri, &id);
    let second =
        eventually("it runs", || children(&host).into_iter().find(|pid| *pid != first && runs(*pid))).await;
    assert_eq!(group_of(second), own.join("inner"));
    waiting.abort();
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

fn runs(pid: i32) -> bool {
    std::fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == Path::new("/demo-app"))
}

/// In the v2 tree.
fn group_of(pid: i32) -> PathBuf {
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    groups.lines().find_map(|line| line.strip_prefix("0::")).unwrap().into()
}

#[tokio::test]
async fn a_thousand_programs_run_at_once_and_the_next_ones_learn_why_they_do_not() {
    const MOST: usize = 1024;
    const MORE: usize = 6;
    let mut host = Host::new();
    let mut cri = host.start().await;
    let (pod, id) = running(&host, &mut cri).await;
    let mut running: Vec<_> = (0..MOST + MORE).map(|_| sleeping(&cri, &id)).collect();
    let ended = eventually_within(SLOWLY, "the refusal of the rest", async || {
        let ended = running.iter().filter(|caller| caller.is_finished()).count();
        (ended == MORE && children(&host).len() == MOST + 1).then_some(ended)
    });
    assert_eq!(ended.await, MORE);
    for caller in running.extract_if(.., |caller| caller.is_finished()) {
        let refused = caller.await.unwrap().unwrap_err();
        let said = refused.message();
        assert!(said.starts_with("exec in container c: 1024 programs that exec has started"), "{refused}");
    }
    let (shim, runtime) =
        (peak_memory(host.shims()[0]), peak_memory(host.runtime.as_ref().unwrap().id().cast_signed()));
    assert!(shim < 48 << 20 && runtime < 256 << 20, "shim: {shim} bytes, runtime: {runtime} bytes");
    for caller in running {
        caller.abort();
    }
    eventually_within(SLOWLY, "their end", async || (children(&host).len() == 1).then_some(())).await;
    let said = exec(&cri, &id, &["/demo-app", "print", "x"], 10).await.unwrap();
    assert_eq!(said.stdout, b"x\n");
    cri.remove_pod(&pod).await;
    host.assert_clean();
}
