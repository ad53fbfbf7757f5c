//! Further programs in running containers.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use proto::cri::security_profile::ProfileType;
use proto::cri::{ExecSyncRequest, ExecSyncResponse, SecurityProfile, StopContainerRequest};
use tests::cri::{Cri, Host, IMAGE, container, eventually};
use tokio::task::JoinHandle;
use tonic::{Code, Status};

use super::containers::{field, with_context};

pub(crate) async fn exec(
    cri: &Cri,
    id: &str,
    cmd: &[&str],
    timeout: i64,
) -> Result<ExecSyncResponse, Status> {
    let cmd = cmd.iter().map(|word| (*word).to_owned()).collect();
    let request = ExecSyncRequest { container_id: id.to_owned(), cmd, timeout };
    Ok(cri.runtime.clone().exec_sync(request).await?.into_inner())
}

/// A pod, and a container of it that sleeps.
pub(crate) async fn running(host: &Host, cri: &mut Cri) -> (String, String) {
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let id = cri.create(&pod, container("c", &["/demo-app", "sleep", "forever"])).await.unwrap();
    cri.start(&id).await.unwrap();
    (pod, id)
}

/// A program that sleeps, and its caller.
pub(crate) fn sleeping(cri: &Cri, id: &str) -> JoinHandle<Result<ExecSyncResponse, Status>> {
    let (cri, id) = (cri.runtime.clone(), id.to_owned());
    tokio::spawn(async move {
        let cmd = ["/demo-app", "sleep", "forever"].map(str::to_owned).to_vec();
        let request = ExecSyncRequest { container_id: id, cmd, timeout: 0 };
        cri.clone().exec_sync(request).await.map(tonic::Response::into_inner)
    })
}

/// The children of the host's only shim.
pub(crate) fn children(host: &Host) -> Vec<i32> {
    let shim = host.shims()[0];
    let children = std::fs::read_to_string(format!("/proc/{shim}/task/{shim}/children")).unwrap();
    children.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

#[tokio::test]
async fn a_further_program_has_output_and_exit_code_of_its_own() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let id = cri.create(&pod, container("c", &["/demo-app", "sleep", "forever"])).await.unwrap();
    let early = exec(&cri, &id, &["/demo-app", "print", "x"], 0).await.unwrap_err();
    assert_eq!(early.code(), Code::FailedPrecondition, "{early}");
    cri.start(&id).await.unwrap();

    let said = exec(&cri, &id, &["/demo-app", "print", "good day"], 10).await.unwrap();
    assert_eq!(
        (said.stdout.as_slice(), said.stderr.as_slice(), said.exit_code),
        (&b"good day\n"[..], &b""[..], 0)
    );
    let seven = exec(&cri, &id, &["/demo-app", "exit", "7"], 0).await.unwrap();
    assert_eq!(seven.exit_code, 7);
    let wrong = exec(&cri, &id, &["/demo-app", "cat", "/absent"], 0).await.unwrap();
    assert!(wrong.exit_code != 0 && !wrong.stderr.is_empty() && wrong.stdout.is_empty(), "{wrong:?}");

    let missing = exec(&cri, &id, &["/missing"], 0).await.unwrap_err();
    assert_eq!(missing.message(), "exec in container c: exec: \"/missing\": no such file or directory");
    let empty = exec(&cri, &id, &[], 0).await.unwrap_err();
    assert_eq!(empty.code(), Code::InvalidArgument, "{empty}");
    let unknown = exec(&cri, "absent", &["/demo-app"], 0).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound, "{unknown}");
    assert_eq!(host.container_log("c"), Vec::<String>::new(), "its output is not the container's");
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_further_program_has_what_the_container_has_and_no_more() {
    assert_has_the_same(true).await;
}

/// The filter is there before privileges are given up.
#[tokio::test]
async fn so_it_has_where_programs_may_get_new_privileges() {
    assert_has_the_same(false).await;
}

async fn assert_has_the_same(no_new_privs: bool) {
    const NAMESPACES: [&str; 6] = ["cgroup", "ipc", "mnt", "net", "pid_for_children", "uts"];
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let config = || {
        with_context(container("c", &["/demo-app", "sleep", "forever"]), |context| {
            context.run_as_user = Some(proto::cri::Int64Value { value: 1234 });
            context.supplemental_groups = vec![5, 6];
            context.no_new_privs = no_new_privs;
            let profile_type = ProfileType::RuntimeDefault.into();
            context.seccomp = Some(SecurityProfile { profile_type, ..SecurityProfile::default() });
        })
    };
    let printed = with_context(container("status", &["/demo-app", "status"]), |context| {
        *context = config().linux.unwrap().security_context.unwrap();
    });
    cri.run(&pod, printed).await;
    let wanted = host.container_log("status");
    let id = cri.create(&pod, config()).await.unwrap();
    cri.start(&id).await.unwrap();
    let first = children(&host)[0];

    let said = exec(&cri, &id, &["/demo-app", "status"], 0).await.unwrap();
    let said = String::from_utf8(said.stdout).unwrap();
    let said: Vec<String> = said.lines().map(|line| format!("stdout F {line}")).collect();
    for name in
        ["Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp"]
    {
        assert_eq!(field(&said, name), field(&wanted, name), "{name}");
    }

    let waiting = sleeping(&cri, &id);
    let runs = |pid: &i32| {
        std::fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == Path::new("/demo-app"))
    };
    let second =
        eventually("it runs", || children(&host).into_iter().find(|pid| *pid != first && runs(pid))).await;
    let link = |pid: i32, path: &str| std::fs::read_link(format!("/proc/{pid}/{path}")).unwrap();
    for name in NAMESPACES {
        assert_eq!(link(second, &format!("ns/{name}")), link(first, &format!("ns/{name}")), "{name}");
    }
    assert_eq!(link(second, "ns/pid"), link(first, "ns/pid"));
    let groups = |pid: i32| std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    assert_eq!(groups(second), groups(first));
    let descriptors: Vec<PathBuf> =
        std::fs::read_dir(format!("/proc/{second}/fd")).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(descriptors.len(), 3, "{descriptors:?}");

    // It ends with the container.
    cri.runtime.stop_container(StopContainerRequest { container_id: id.clone(), timeout: 0 }).await.unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(10), waiting).await.unwrap().unwrap();
    assert_eq!(ended.unwrap().exit_code, 137);
    let late = exec(&cri, &id, &["/demo-app", "print", "x"], 0).await.unwrap_err();
    assert_eq!(late.code(), Code::FailedPrecondition, "{late}");
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_program_that_does_not_end_in_time_or_whose_caller_goes_away_is_killed() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let (pod, id) = running(&host, &mut cri).await;
    let begun = Instant::now();
    let late = exec(&cri, &id, &["/demo-app", "hold", "256"], 1).await.unwrap_err();
    assert_eq!(late.code(), Code::DeadlineExceeded, "{late}");
    assert!(begun.elapsed() >= Duration::from_secs(1));
    assert_eq!(children(&host).len(), 1, "the answer comes after its end");

    let waiting = sleeping(&cri, &id);
    eventually("it runs", || (children(&host).len() == 2).then_some(())).await;
    waiting.abort();
    eventually("it is killed", || (children(&host).len() == 1).then_some(())).await;
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

/// The limit is of the program, not of what it left behind.
#[tokio::test]
async fn a_program_that_leaves_a_process_with_its_output_has_its_exit_code() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let (pod, id) = running(&host, &mut cri).await;
    let left = exec(&cri, &id, &["/demo-app", "leave"], 5).await.unwrap();
    assert_eq!((left.exit_code, left.stdout.len(), left.stderr.len()), (0, 0, 0));
    let next = exec(&cri, &id, &["/demo-app", "print", "x"], 5).await.unwrap();
    assert_eq!(next.stdout, b"x\n");
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn the_end_of_the_runtime_does_not_wait_for_programs() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let (pod, id) = running(&host, &mut cri).await;
    let waiting = sleeping(&cri, &id);
    eventually("it runs", || (children(&host).len() == 2).then_some(())).await;
    let mut runtime = host.runtime.take().unwrap();
    let pid = nix::unistd::Pid::from_raw(runtime.id().cast_signed());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(10), waiting).await.unwrap().unwrap().unwrap_err();
    assert_eq!(ended.code(), Code::Unavailable, "{ended}");
    drop(cri);
    let status = tokio::task::spawn_blocking(move || runtime.wait()).await.unwrap().unwrap();
    assert!(status.success(), "{status}");
    eventually("it is killed", || (children(&host).len() == 1).then_some(())).await;
    let mut cri = host.start().await;
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn output_is_read_to_its_end_and_kept_up_to_a_limit() {
    const LIMIT: usize = (8 << 20) - 1024;
    let mut host = Host::new();
    let mut cri = host.start().await;
    let (pod, id) = running(&host, &mut cri).await;
    let first = children(&host)[0];
    let large = format!("/proc/{first}/root/large");
    std::fs::write(&large, vec![b'x'; LIMIT - 1]).unwrap();
    let mut larger = cri.runtime.clone().max_decoding_message_size(64 << 20);
    let mut cat = async || {
        let cmd = ["/demo-app", "cat", "/large"].map(str::to_owned).to_vec();
        let request = ExecSyncRequest { container_id: id.clone(), cmd, timeout: 0 };
        larger.exec_sync(request).await.unwrap().into_inner()
    };
    let whole = cat().await;
    assert_eq!((whole.stdout.len(), whole.exit_code), (LIMIT - 1, 0));
    std::fs::write(&large, vec![b'x'; LIMIT + 5]).unwrap();
    let cut = cat().await;
    assert_eq!((cut.stdout.len(), cut.exit_code), (LIMIT, 0));
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_thousand_programs_run_at_the_same_time() {
    const MANY: usize = 1000;
    let mut host = Host::new();
    let mut cri = host.start().await;
    let (pod, id) = running(&host, &mut cri).await;
    let mut running = tokio::task::JoinSet::new();
    for number in 0..MANY {
        let (mut other, of) = (cri.runtime.clone(), id.clone());
        running.spawn(async move {
            let cmd = vec!["/demo-app".to_owned(), "print".to_owned(), number.to_string()];
            let answer = other.exec_sync(ExecSyncRequest { container_id: of, cmd, timeout: 60 }).await;
            (number, answer.unwrap().into_inner())
        });
    }
    while let Some(ended) = running.join_next().await {
        let (number, answer) = ended.unwrap();
        assert_eq!(String::from_utf8(answer.stdout).unwrap(), format!("{number}\n"));
        assert_eq!(answer.exit_code, 0);
    }
    eventually("no child is left", || (children(&host).len() == 1).then_some(())).await;
    cri.remove_pod(&pod).await;
    host.assert_clean();
}
