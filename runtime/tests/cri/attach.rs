//! Attach: several clients of a container's first process, over SPDY/3.1 and WebSocket.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use proto::cri::{AttachRequest, ContainerConfig, StopContainerRequest};
use serde_json::Value;
use tests::cri::{Cri, Host, IMAGE, container, eventually};
use tokio_tungstenite::tungstenite::Message;
use tonic::Code;

use super::exec::children;
use super::exec_limits::peak_memory;
use super::spdy_client::{Client, Frame};
use super::streams::{
    EXEC_BY_WEBSOCKET, WebSocket, all, heard, host, open_streams, say, success, until, websocket,
};

type Streams = (Client, HashMap<&'static str, u32>);

/// A pod with a container that repeats its stdin.
async fn copying(host: &Host, cri: &mut Cri, stdin_once: bool) -> (String, String) {
    started(host, cri, ContainerConfig { stdin: true, stdin_once, ..container("c", &["/demo-app", "copy"]) })
        .await
}

async fn started(host: &Host, cri: &mut Cri, config: ContainerConfig) -> (String, String) {
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let id = cri.create(&pod, config).await.unwrap();
    cri.start(&id).await.unwrap();
    (pod, id)
}

async fn url(cri: &mut Cri, request: AttachRequest) -> String {
    cri.runtime.attach(request).await.unwrap().into_inner().url
}

fn request(id: &str, [stdin, stdout, stderr]: [bool; 3]) -> AttachRequest {
    AttachRequest { container_id: id.to_owned(), stdin, tty: false, stdout, stderr }
}

async fn attach(cri: &mut Cri, id: &str) -> Streams {
    let url = url(cri, request(id, [true; 3])).await;
    open_streams(&url, [true, true, true, false]).await
}

async fn stop(cri: &mut Cri, id: &str) {
    let wanted = StopContainerRequest { container_id: id.to_owned(), timeout: 0 };
    cri.runtime.stop_container(wanted).await.unwrap();
}

async fn by_websocket(cri: &mut Cri, id: &str) -> WebSocket {
    websocket(&url(cri, request(id, [true; 3])).await, EXEC_BY_WEBSOCKET).await
}

/// Reads on until the container has said `wanted`.
async fn until_said(client: &mut WebSocket, said: &mut Vec<u8>, wanted: &[u8]) {
    let reading = async {
        while !said.windows(wanted.len()).any(|window| window == wanted) {
            if let Message::Binary(bytes) = client.next().await.unwrap().unwrap() {
                said.extend(&bytes[1..]);
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(20), reading).await.expect("it is said");
}

#[tokio::test]
async fn several_clients_share_the_streams_of_a_container_and_its_log_goes_on() {
    let (mut host, mut cri) = host().await;
    let (pod, id) = copying(&host, &mut cri, false).await;
    let (mut first, ids) = attach(&mut cri, &id).await;
    // What a client says comes back once it is attached.
    let (mut first_said, mut second_said) = (Vec::new(), Vec::new());
    first.data(ids["stdin"], b"one\n", false).await;
    until(&mut first, &mut first_said, b"one\n").await;
    let mut second = by_websocket(&mut cri, &id).await;
    say(&mut second, 0, b"two\n").await;
    until_said(&mut second, &mut second_said, b"two\n").await;
    until(&mut first, &mut first_said, b"two\n").await;
    first.data(ids["stdin"], b"both\n", false).await;
    until(&mut first, &mut first_said, b"both\n").await;
    until_said(&mut second, &mut second_said, b"both\n").await;
    assert_eq!(first_said, b"one\ntwo\nboth\n");
    assert_eq!(second_said, b"two\nboth\n");

    // A client whose stdin has ended is detached. The container's stdin stays open for others.
    first.data(ids["stdin"], b"", true).await;
    let (_, status) = all(&mut first, &ids).await;
    assert_eq!(status, success());
    say(&mut second, 0, b"three\n").await;
    until_said(&mut second, &mut second_said, b"three\n").await;

    // It stays open for clients of another runtime, too.
    host.kill();
    drop(second);
    let mut cri = host.start().await;
    let (mut third, ids) = attach(&mut cri, &id).await;
    let mut said = Vec::new();
    third.data(ids["stdin"], b"four\n", false).await;
    until(&mut third, &mut said, b"four\n").await;
    let lines = ["one", "two", "both", "three", "four"].map(|line| format!("stdout F {line}"));
    eventually("the log has all", || (host.container_log("c") == lines).then_some(())).await;

    // The end of the container is that of the connection.
    stop(&mut cri, &id).await;
    let (_, status) = all(&mut third, &ids).await;
    assert_eq!(status, success());
    let late = cri.runtime.attach(request(&id, [true; 3])).await.unwrap_err();
    assert_eq!(late.code(), Code::FailedPrecondition, "{late}");
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn stdin_for_one_client_ends_with_it() {
    let (host, mut cri) = host().await;
    for says_so in [true, false] {
        let (pod, id) = copying(&host, &mut cri, true).await;
        let (mut other, other_ids) = attach(&mut cri, &id).await;
        other.data(other_ids["stdin"], b"here\n", false).await;
        until(&mut other, &mut Vec::new(), b"here\n").await;
        let (mut client, ids) = attach(&mut cri, &id).await;
        client.data(ids["stdin"], b"all\n", says_so).await;
        if says_so {
            // What the container still writes comes, and then its end.
            let (streams, status) = all(&mut client, &ids).await;
            assert_eq!((streams["stdout"].as_slice(), status), (&b"all\n"[..], success()));
        } else {
            // It goes away instead.
            until(&mut client, &mut Vec::new(), b"all\n").await;
            drop(client);
        }
        let (streams, status) = all(&mut other, &other_ids).await;
        assert_eq!((streams["stdout"].as_slice(), status), (&b"all\n"[..], success()));
        assert_eq!(cri.ended(&id).await.exit_code, 0);
        cri.remove_pod(&pod).await;
    }
    host.assert_clean();
}

#[tokio::test]
async fn a_container_has_a_terminal_that_clients_share() {
    let (mut host, mut cri) = host().await;
    let config = ContainerConfig { stdin: true, tty: true, ..container("c", &["/demo-app", "terminal"]) };
    let (pod, id) = started(&host, &mut cri, config).await;
    let of_terminal = async |cri: &mut Cri| {
        let wanted = AttachRequest { tty: true, ..request(&id, [true, true, false]) };
        open_streams(&url(cri, wanted).await, [true, true, false, true]).await
    };
    eventually("it runs", || (!host.container_log("c").is_empty()).then_some(())).await;
    let process = format!("/proc/{}", children(&host)[0]);
    let link = |path: &str| std::fs::read_link(format!("{process}/{path}")).unwrap();
    for stream in 0..3 {
        assert_eq!(link(&format!("fd/{stream}")), Path::new("/dev/pts/0"));
    }
    let device = |path: &str| std::fs::metadata(format!("{process}/{path}")).unwrap().rdev();
    assert_eq!(device("root/dev/console"), device("fd/0"));
    let (mut client, ids) = of_terminal(&mut cri).await;
    let mut said = Vec::new();
    client.data(ids["resize"], br#"{"Width":120,"Height":40}"#, false).await;
    until(&mut client, &mut said, b"120 columns, 40 rows\r\n").await;
    // For another client of the same size, the program draws all of it again.
    let (mut other, other_ids) = of_terminal(&mut cri).await;
    let mut other_said = Vec::new();
    other.data(other_ids["resize"], br#"{"Width":120,"Height":40}"#, false).await;
    until(&mut other, &mut other_said, b"120 columns, 40 rows\r\n").await;

    host.kill();
    let mut cri = host.start().await;
    let (mut client, ids) = of_terminal(&mut cri).await;
    let mut said = Vec::new();
    client.data(ids["resize"], br#"{"Width":80,"Height":24}"#, false).await;
    until(&mut client, &mut said, b"80 columns, 24 rows\r\n").await;
    // The terminal's interrupt character: SIGINT to its foreground processes.
    client.data(ids["stdin"], b"\x03", false).await;
    let (_, status) = all(&mut client, &ids).await;
    assert_eq!(status, success());
    assert_eq!(cri.status(&id).await.exit_code, 130);
    let log = std::fs::read_to_string(host.path("logs/c.log")).unwrap();
    assert!(log.lines().next().unwrap().ends_with(" stdout F 0 columns, 0 rows"), "{log}");
    assert!(log.contains(" stdout F 80 columns, 24 rows\r\n"), "{log}");
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

/// It has the terminal when it ends before the runtime could look.
#[tokio::test]
async fn the_output_of_a_short_program_on_a_terminal_is_in_the_log() {
    let (host, mut cri) = host().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    for round in 0..20 {
        let name = format!("c{round}");
        let config = ContainerConfig { tty: true, ..container(&name, &["/demo-app", "print", "good day"]) };
        assert_eq!(cri.run(&pod, config).await.exit_code, 0);
        let log = std::fs::read_to_string(host.path("logs").join(format!("{name}.log"))).unwrap();
        assert!(log.ends_with(" stdout F good day\r\n") && log.lines().count() == 1, "{log}");
    }
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

/// It keeps its connection, and does not read.
#[tokio::test]
async fn a_client_that_does_not_read_is_given_up_and_stops_nothing() {
    const SENT: usize = 24 << 20;
    let (host, mut cri) = host().await;
    let (pod, id) = copying(&host, &mut cri, true).await;
    let wanted = request(&id, [false, true, true]);
    let (mut silent, silent_ids) =
        open_streams(&url(&mut cri, wanted).await, [false, true, true, false]).await;
    let (client, ids) = attach(&mut cri, &id).await;
    let (mut out, mut sending) = client.split();
    let (stdin, begun) = (ids["stdin"], Instant::now());
    let writer = tokio::spawn(async move {
        for _ in 0..SENT / (1 << 20) {
            sending.data(stdin, &[&[b'x'; (1 << 20) - 1][..], b"\n"].concat(), false).await;
        }
        sending.data(stdin, b"", true).await;
        sending
    });
    let (streams, status) = all(&mut out, &ids).await;
    drop(writer.await.unwrap());
    assert_eq!((streams["stdout"].len(), status), (SENT, success()));
    assert_eq!(cri.ended(&id).await.exit_code, 0);
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    let shim = peak_memory(host.shims()[0]);
    assert!(shim < 32 << 20, "the shim had {shim} bytes");
    // When it reads at last, it gets the beginning, and why there is no more.
    let (mut got, mut status) = (0, Vec::new());
    while let Some(frame) = silent.next().await {
        match frame {
            Frame::Data { id, bytes, .. } if id == silent_ids["error"] => status.extend(bytes),
            Frame::Data { bytes, .. } => got += bytes.len(),
            Frame::GoAway => break,
            _ => {}
        }
    }
    let status: Value = serde_json::from_slice(&status).unwrap();
    assert!(got > 0 && got < SENT, "{got} bytes");
    let message = status["message"].as_str().unwrap();
    assert!(
        message.starts_with("attach to container c: the client took less than 32768 bytes in 2 s"),
        "{status}"
    );
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_container_without_stdin_takes_none_and_shows_its_output() {
    let (host, mut cri) = host().await;
    let (pod, id) = started(&host, &mut cri, container("c", &["/demo-app", "count"])).await;
    let mut client = by_websocket(&mut cri, &id).await;
    let mut said = Vec::new();
    say(&mut client, 0, &vec![b'x'; 500_000]).await;
    until_said(&mut client, &mut said, b"0\n").await;
    stop(&mut cri, &id).await;
    let channels = heard(&mut client).await;
    assert_eq!(serde_json::from_slice::<Value>(&channels[&3]).unwrap(), success());
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn an_attach_that_cannot_be_is_refused() {
    const MOST: usize = 128;
    let (host, mut cri) = host().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let config = ContainerConfig { stdin: true, ..container("c", &["/demo-app", "copy"]) };
    let id = cri.create(&pod, config).await.unwrap();
    let early = cri.runtime.attach(request(&id, [true; 3])).await.unwrap_err();
    assert_eq!(early.code(), Code::FailedPrecondition, "{early}");
    let unknown = cri.runtime.attach(request("absent", [true; 3])).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound, "{unknown}");
    cri.start(&id).await.unwrap();
    let nothing = cri.runtime.attach(request(&id, [false; 3])).await.unwrap_err();
    assert_eq!(nothing.code(), Code::InvalidArgument, "{nothing}");
    let wrong = AttachRequest { tty: true, ..request(&id, [true; 3]) };
    let wrong = cri.runtime.attach(wrong).await.unwrap_err();
    assert!(wrong.code() == Code::InvalidArgument && wrong.message().contains("stderr"), "{wrong}");

    // So many clients of a pod, and no more.
    let mut clients = Vec::new();
    for _ in 0..MOST {
        let (mut client, ids) = attach(&mut cri, &id).await;
        let mut said = Vec::new();
        client.data(ids["stdin"], b"here\n", false).await;
        until(&mut client, &mut said, b"here\n").await;
        clients.push(client);
    }
    let (mut refused, ids) = attach(&mut cri, &id).await;
    let (_, status) = all(&mut refused, &ids).await;
    let message = status["message"].as_str().unwrap();
    assert!(message.starts_with("attach to container c: 128 clients are attached"), "{status}");
    drop(clients);
    // Those that have gone make room, soon.
    let client = loop {
        let (mut client, ids) = attach(&mut cri, &id).await;
        client.data(ids["stdin"], b"again\n", false).await;
        match client.next().await {
            Some(Frame::Data { bytes, .. }) if bytes == b"again\n" => break client,
            // Refused: its streams end, in any order.
            Some(Frame::Data { id, bytes, .. }) if id == ids["error"] || bytes.is_empty() => {}
            other => panic!("{other:?}"),
        }
    };
    drop(client);
    cri.remove_pod(&pod).await;
    host.assert_clean();
}
