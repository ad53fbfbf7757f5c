//! Clients of the streaming server that take too much of it, or of each other.

use std::path::Path;

use futures_util::{SinkExt, StreamExt};
use proto::cri::{ExecRequest, PortForwardRequest, StopContainerRequest};
use tests::cri::{Cri, eventually, eventually_within};
use tokio_tungstenite::tungstenite::Message;

use super::exec::{children, exec, running};
use super::exec_limits::peak_memory;
use super::spdy_client::{Client, Frame, connect};
use super::streams::{
    EXEC, EXEC_BY_WEBSOCKET, PORT_FORWARD, PORT_FORWARD_BY_WEBSOCKET, all, heard, host, open_streams, pair,
    serving, websocket,
};

async fn url(cri: &mut Cri, id: &str) -> String {
    let cmd = ["/demo-app", "sleep", "forever"].map(str::to_owned).to_vec();
    let request =
        ExecRequest { container_id: id.to_owned(), cmd, tty: false, stdin: true, stdout: true, stderr: true };
    cri.runtime.exec(request).await.unwrap().into_inner().url
}

#[tokio::test]
async fn a_client_above_the_limit_learns_so_and_is_served_when_there_is_room() {
    let (host, mut cri) = host().await;
    let (pod, id) = running(&host, &mut cri).await;
    let most = usize::try_from(linux::process::descriptor_limit() / 16).unwrap().min(1024);
    let upgrade =
        format!("POST Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: {EXEC}\r\n");
    let mut clients = Vec::new();
    for _ in 0..most {
        let (client, status) = connect(&url(&mut cri, &id).await, &upgrade).await;
        assert_eq!(status, 101);
        clients.push(client);
    }
    let next = url(&mut cri, &id).await;
    assert_eq!(connect(&next, &upgrade).await.1, 503);
    clients.pop();
    // The URL was not used.
    loop {
        match connect(&next, &upgrade).await.1 {
            101 => break,
            status => assert_eq!(status, 503),
        }
    }
    drop(clients);
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

/// It keeps its connection, and does not read.
#[tokio::test]
async fn a_program_whose_client_does_not_read_waits_takes_little_memory_and_ends_with_the_client() {
    let (host, mut cri) = host().await;
    let (pod, id) = running(&host, &mut cri).await;
    let cmd = ["/demo-app", "flood", "268435456", "0"].map(str::to_owned).to_vec();
    let flood =
        ExecRequest { container_id: id.clone(), cmd, tty: false, stdin: false, stdout: true, stderr: true };
    let url = cri.runtime.exec(flood).await.unwrap().into_inner().url;
    let (silent, _ids) = open_streams(&url, [false, true, true, false]).await;
    // Not a process that only starts it.
    let floods = |pid: &i32| {
        let arguments = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        arguments.starts_with(b"/demo-app\0flood\0")
    };
    let program = eventually("the program runs", || children(&host).into_iter().find(floods)).await;
    let written = || {
        let io = std::fs::read_to_string(format!("/proc/{program}/io")).unwrap();
        let line = io.lines().find_map(|line| line.strip_prefix("wchar: ")).unwrap();
        line.parse::<u64>().unwrap()
    };
    // Nothing was taken for that many looks: it waits.
    let (mut before, mut same) = (0, 0);
    let waits = async || {
        let now = written();
        same = if now > 0 && now == before { same + 1 } else { 0 };
        before = now;
        (same == 30).then_some(now)
    };
    let kept = eventually_within(std::time::Duration::from_secs(30), "it waits", waits).await;
    assert!(kept < 64 << 20, "{kept} bytes were taken from it");
    let said = exec(&cri, &id, &["/demo-app", "print", "x"], 10).await.unwrap();
    assert_eq!(said.stdout, b"x\n", "others go on");
    let (shim, runtime) =
        (peak_memory(host.shims()[0]), peak_memory(host.runtime.as_ref().unwrap().id().cast_signed()));
    assert!(shim < 48 << 20 && runtime < 256 << 20, "shim: {shim} bytes, runtime: {runtime} bytes");
    drop(silent);
    eventually("the program's end", || (children(&host).len() == 1).then_some(())).await;
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_connection_that_a_pod_does_not_read_ends_and_the_others_of_its_client_go_on() {
    let (host, mut cri, pod, first) = serving().await;
    let network = linux::netns::NetNs::open(Path::new(&format!("/proc/{first}/ns/net"))).unwrap();
    let _silent = network.run(|| std::net::TcpListener::bind("127.0.0.1:90")).unwrap().unwrap();
    let wanted = PortForwardRequest { pod_sandbox_id: pod.clone(), port: Vec::new() };
    let url = cri.runtime.port_forward(wanted).await.unwrap().into_inner().url;
    let mut client = Client::of(&url, PORT_FORWARD).await;
    eventually("it listens", || (!host.container_log("c").is_empty()).then_some(())).await;
    let (error, unread) = pair(&mut client, "90", "1").await;
    let (mut out, mut sending) = client.split();
    // More than the kernel and the runtime keep for it.
    let sent = tokio::spawn(async move {
        for _ in 0..24 {
            sending.data(unread, &vec![b'x'; 1 << 20], false).await;
        }
        let headers = |kind| [("streamtype", kind), ("port", "80"), ("requestid", "2")];
        sending.open(&headers("error")).await;
        let data = sending.open(&headers("data")).await;
        sending.data(data, b"GET /passwd HTTP/1.0\r\n\r\n", true).await;
        (sending, data)
    });
    let (mut is_reset, mut problem, mut answers) = (false, Vec::new(), Vec::new());
    loop {
        match out.next().await.expect("the connection goes on") {
            Frame::Reset { id } if id == unread => is_reset = true,
            Frame::Data { id, bytes, .. } if id == error => problem.extend(bytes),
            Frame::Data { id, bytes, is_last } => {
                answers.extend(bytes);
                // Its other stream ends too.
                if is_last && !answers.is_empty() && id > unread {
                    break;
                }
            }
            _ => {}
        }
    }
    let (_sending, _data) = sent.await.unwrap();
    assert!(is_reset);
    assert_eq!(String::from_utf8(problem).unwrap(), "port 90 of the pod: it does not read what it was sent");
    let passwd = std::fs::read(format!("/proc/{first}/root/etc/passwd")).unwrap();
    assert!(answers.ends_with(&passwd), "{}", String::from_utf8_lossy(&answers));
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_connection_by_websocket_ends_too_if_its_pod_does_not_read() {
    let (host, mut cri, pod, first) = serving().await;
    let network = linux::netns::NetNs::open(Path::new(&format!("/proc/{first}/ns/net"))).unwrap();
    let _silent = network.run(|| std::net::TcpListener::bind("127.0.0.1:90")).unwrap().unwrap();
    let wanted = PortForwardRequest { pod_sandbox_id: pod.clone(), port: vec![90] };
    let url = cri.runtime.port_forward(wanted).await.unwrap().into_inner().url;
    let (mut sending, mut receiving) = websocket(&url, PORT_FORWARD_BY_WEBSOCKET).await.split();
    // More than the kernel keeps for it.
    let sent = tokio::spawn(async move {
        let piece = [&[0][..], &vec![b'x'; 16 << 10]].concat();
        while sending.send(Message::binary(piece.clone())).await.is_ok() {}
    });
    let channels = heard(&mut receiving).await;
    let problem = String::from_utf8_lossy(&channels[&1][2..]).into_owned();
    assert_eq!(problem, "port 90 of the pod: it does not read what it was sent");
    sent.await.unwrap();
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

/// Its clients learn how the program ended; a URL that was not used yet is of no container that runs.
#[tokio::test]
async fn a_program_ends_with_its_container_and_its_clients_learn_so() {
    let (host, mut cri) = host().await;
    let (pod, id) = running(&host, &mut cri).await;
    let (mut by_spdy, ids) = open_streams(&url(&mut cri, &id).await, [true, true, true, false]).await;
    let mut by_websocket = websocket(&url(&mut cri, &id).await, EXEC_BY_WEBSOCKET).await;
    let unused = url(&mut cri, &id).await;
    // Until its execve(2), a child of the shim may not be in the container yet.
    let runs = |pid: &i32| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "demo-app\n")
    };
    let all_run = |children: &[i32]| children.len() == 3 && children.iter().all(runs);
    eventually("both run", || all_run(&children(&host)).then_some(())).await;
    let stop = StopContainerRequest { container_id: id.clone(), timeout: 0 };
    cri.runtime.stop_container(stop).await.unwrap();
    let (_, status) = all(&mut by_spdy, &ids).await;
    assert_eq!(status["details"]["causes"][0]["message"], "137", "{status}");
    let channels = heard(&mut by_websocket).await;
    let status = String::from_utf8_lossy(&channels[&3]).into_owned();
    assert!(status.contains("\"137\""), "{status}");
    let (mut late, ids) = open_streams(&unused, [true, true, true, false]).await;
    let (_, status) = all(&mut late, &ids).await;
    assert!(status["status"] == "Failure" && status["message"].as_str().unwrap().contains(&id), "{status}");
    assert_eq!(children(&host), Vec::<i32>::new());
    cri.remove_pod(&pod).await;
    host.assert_clean();
}
