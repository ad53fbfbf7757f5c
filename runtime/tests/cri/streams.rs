//! Exec and PortForward with a client's streams, over SPDY/3.1.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

use futures_util::{SinkExt, Stream, StreamExt};
use proto::cri::{ExecRequest, PortForwardRequest};
use serde_json::{Value, json};
use tests::cri::{Cri, Host, IMAGE, container, eventually};
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::protocol::Role;
use tokio_tungstenite::tungstenite::{self, Message};
use tonic::Code;

use super::exec::{children, running};
use super::spdy_client::{Client, Frame, answer, connect, ends_within};

pub(crate) const EXEC: &str = "v4.channel.k8s.io";
pub(crate) const EXEC_BY_WEBSOCKET: &str = "v5.channel.k8s.io";
const V4_BY_WEBSOCKET: &str = "v4.channel.k8s.io";
pub(crate) const PORT_FORWARD_BY_WEBSOCKET: &str = "v4.channel.k8s.io";
pub(crate) const PORT_FORWARD: &str = "portforward.k8s.io";

/// A host on whose loopback interface the streaming server is reached.
pub(crate) async fn host() -> (Host, Cri) {
    let mut host = Host::new();
    set_loopback_up("/proc/thread-self/ns/net");
    let cri = host.start().await;
    (host, cri)
}

pub(crate) fn set_loopback_up(network: &str) {
    let network = std::fs::File::open(network).unwrap();
    let shared = rustix::io::fcntl_dupfd_cloexec(&network, 3).unwrap();
    rustix::io::fcntl_setfd(&shared, rustix::io::FdFlags::empty()).unwrap();
    let path = format!("--net=/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&shared));
    let status = Command::new("nsenter").arg(path).args(["ip", "link", "set", "lo", "up"]).status().unwrap();
    assert!(status.success());
}

fn request(container: &str, cmd: &[&str], streams: [bool; 3]) -> ExecRequest {
    let [stdin, stdout, stderr] = streams;
    let cmd = cmd.iter().map(|word| (*word).to_owned()).collect();
    ExecRequest { container_id: container.to_owned(), cmd, tty: false, stdin, stdout, stderr }
}

async fn url(cri: &mut Cri, request: ExecRequest) -> String {
    cri.runtime.exec(request).await.unwrap().into_inner().url
}

/// The client after its streams were accepted, and their numbers.
async fn exec(cri: &mut Cri, request: ExecRequest) -> (Client, HashMap<&'static str, u32>) {
    let ([stdin, stdout, stderr], tty) = ([request.stdin, request.stdout, request.stderr], request.tty);
    open_streams(&url(cri, request).await, [stdin, stdout, stderr, tty]).await
}

/// `wanted`: stdin, stdout, stderr and sizes of a terminal.
pub(crate) async fn open_streams(url: &str, wanted: [bool; 4]) -> (Client, HashMap<&'static str, u32>) {
    let mut client = Client::of(url, EXEC).await;
    let mut ids = HashMap::from([("error", client.open(&[("streamtype", "error")]).await)]);
    let names = ["stdin", "stdout", "stderr", "resize"];
    for (name, _) in names.into_iter().zip(wanted).filter(|(_, is_wanted)| *is_wanted) {
        ids.insert(name, client.open(&[("streamtype", name)]).await);
    }
    for _ in 0..ids.len() {
        assert!(matches!(client.next().await, Some(Frame::Accepted { .. })));
    }
    (client, ids)
}

/// What came on each stream until all had ended, and the status that `error` had.
pub(crate) async fn all(
    client: &mut Client,
    ids: &HashMap<&'static str, u32>,
) -> (HashMap<&'static str, Vec<u8>>, Value) {
    let mut streams: HashMap<&'static str, Vec<u8>> = HashMap::new();
    let mut open = ids.len();
    while open > 0 {
        let Some(Frame::Data { id, bytes, is_last }) = client.next().await else { panic!("{streams:?}") };
        let name = ids.iter().find(|(_, known)| **known == id).unwrap().0;
        streams.entry(name).or_default().extend(bytes);
        open -= usize::from(is_last);
    }
    let status = serde_json::from_slice(&streams.remove("error").unwrap()).unwrap();
    assert_eq!(client.next().await, Some(Frame::GoAway));
    (streams, status)
}

pub(crate) fn success() -> Value {
    json!({"metadata": {}, "status": "Success"})
}

#[tokio::test]
async fn a_program_has_the_streams_and_the_client_its_exit_code() {
    let (host, mut cri) = host().await;
    let (pod, id) = running(&host, &mut cri).await;
    let (client, ids) = exec(&mut cri, request(&id, &["/demo-app", "copy"], [true; 3])).await;
    let sent: Vec<u8> = (0..700_000_u32).flat_map(u32::to_le_bytes).collect();
    let (mut out, mut sending) = client.split();
    let copy = sent.clone();
    let stdin = ids["stdin"];
    let writer = tokio::spawn(async move {
        for piece in copy.chunks(100_000) {
            sending.data(stdin, piece, false).await;
        }
        sending.data(stdin, b"", true).await;
        sending
    });
    let (streams, status) = all(&mut out, &ids).await;
    assert!(streams["stdout"] == sent, "{} bytes", streams["stdout"].len());
    assert_eq!((streams["stderr"].as_slice(), status), (&b""[..], success()));
    drop(writer.await.unwrap());

    let (mut client, ids) =
        exec(&mut cri, request(&id, &["/demo-app", "exit", "7"], [false, true, true])).await;
    let (_, status) = all(&mut client, &ids).await;
    assert_eq!(status["details"]["causes"][0], json!({"reason": "ExitCode", "message": "7"}));

    // Only what the client asked for is sent.
    let (mut client, ids) =
        exec(&mut cri, request(&id, &["/demo-app", "cat", "/absent"], [false, false, true])).await;
    let (streams, status) = all(&mut client, &ids).await;
    assert!(!streams["stderr"].is_empty() && status["reason"] == "NonZeroExitCode", "{streams:?} {status}");

    let (mut client, ids) = exec(&mut cri, request(&id, &["/missing"], [false, true, true])).await;
    let (_, status) = all(&mut client, &ids).await;
    let message = status["message"].as_str().unwrap();
    assert!(message.contains("\"/missing\": no such file or directory"), "{status}");
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_program_has_a_terminal_of_the_size_that_the_client_names() {
    let (host, mut cri) = host().await;
    let (pod, id) = running(&host, &mut cri).await;
    let wanted = ExecRequest { tty: true, ..request(&id, &["/demo-app", "terminal"], [true, true, false]) };
    let (mut client, ids) = exec(&mut cri, wanted).await;
    let mut said = Vec::new();
    client.data(ids["resize"], br#"{"Width":120,"Height":40}"#, false).await;
    until(&mut client, &mut said, b"120 columns, 40 rows\r\n").await;
    client.data(ids["resize"], br#"{"Width":80,"#, false).await;
    client.data(ids["resize"], br#""Height":24}"#, false).await;
    until(&mut client, &mut said, b"80 columns, 24 rows\r\n").await;
    // The terminal's interrupt character: SIGINT to its foreground processes.
    client.data(ids["stdin"], b"\x03", false).await;
    let (streams, status) = all(&mut client, &ids).await;
    assert_eq!(status["details"]["causes"][0]["message"], "130", "{streams:?}");

    // A program may close its terminal, and open it again.
    let reopens = request(&id, &["/demo-app", "reopen-terminal"], [true, true, false]);
    let (mut client, ids) = exec(&mut cri, ExecRequest { tty: true, ..reopens }).await;
    until(&mut client, &mut Vec::new(), b"open again\r\n").await;
    let (_, status) = all(&mut client, &ids).await;
    assert_eq!(status["status"], "Success", "{status}");

    let wrong = ExecRequest { tty: true, ..request(&id, &["/demo-app"], [false, true, true]) };
    let refused = cri.runtime.exec(wrong).await.unwrap_err();
    assert!(refused.code() == Code::InvalidArgument && refused.message().contains("stderr"), "{refused}");
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

pub(crate) async fn until(client: &mut Client, said: &mut Vec<u8>, wanted: &[u8]) {
    while !said.windows(wanted.len()).any(|window| window == wanted) {
        match client.next().await {
            Some(Frame::Data { bytes, .. }) => said.extend(bytes),
            other => panic!("{other:?} after {:?}", String::from_utf8_lossy(said)),
        }
    }
}

#[tokio::test]
async fn a_program_whose_client_goes_away_is_killed() {
    let (host, mut cri) = host().await;
    let (pod, id) = running(&host, &mut cri).await;
    let goes_on = ["/demo-app", "count"];
    for reads in [true, false] {
        let (mut client, _) = exec(&mut cri, request(&id, &goes_on, [true, true, false])).await;
        if reads {
            assert!(matches!(client.next().await, Some(Frame::Data { .. })));
        }
        eventually("it runs", || (children(&host).len() == 2).then_some(())).await;
        drop(client);
        eventually("it is killed", || (children(&host).len() == 1).then_some(())).await;
    }
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

/// Its client keeps the connection, and neither reads nor writes.
#[tokio::test]
async fn a_program_whose_output_is_not_taken_holds_nothing_else_up() {
    let (host, mut cri) = host().await;
    let (pod, id) = running(&host, &mut cri).await;
    let first = children(&host)[0];
    std::fs::write(format!("/proc/{first}/root/large"), vec![b'x'; 64 << 20]).unwrap();
    let (silent, _) =
        exec(&mut cri, request(&id, &["/demo-app", "cat", "/large"], [false, true, false])).await;
    for _ in 0..3 {
        let (mut client, ids) =
            exec(&mut cri, request(&id, &["/demo-app", "print", "x"], [false, true, true])).await;
        let (streams, status) = all(&mut client, &ids).await;
        assert_eq!((streams["stdout"].as_slice(), status), (&b"x\n"[..], success()));
    }
    assert_eq!(children(&host).len(), 2);
    drop(silent);
    eventually("it is killed", || (children(&host).len() == 1).then_some(())).await;
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_url_is_good_for_one_client_that_asks_as_it_should() {
    let (host, mut cri) = host().await;
    let (pod, id) = running(&host, &mut cri).await;
    let print = || request(&id, &["/demo-app", "print", "x"], [false, true, false]);
    let first = url(&mut cri, print()).await;
    let other = url(&mut cri, print()).await;
    assert_ne!(first, other);
    let status = async |url: &str, head: &str| connect(url, head).await.1;
    let upgrade = "Connection: Upgrade\r\nUpgrade: SPDY/3.1\r\n";
    let whole = format!("POST {upgrade}X-Stream-Protocol-Version: {EXEC}\r\n");
    assert_eq!(status(&first, &format!("DELETE {upgrade}")).await, 405);
    assert_eq!(status(&first, "GET ").await, 400);
    assert_eq!(status(&first, &format!("GET {upgrade}X-Stream-Protocol-Version: v9\r\n")).await, 403);
    assert_eq!(status(&first.replace("/exec/", "/portforward/"), &whole).await, 404);
    assert_eq!(status(&format!("{first}0"), &whole).await, 404);
    assert_eq!(status(&first, &whole).await, 101);
    assert_eq!(status(&first, &whole).await, 404);
    let endless =
        format!("GET {upgrade}X-Stream-Protocol-Version: {EXEC}\r\nX-Long: {}\r\n", "x".repeat(1 << 20));
    assert!(matches!(answer(&other, &endless).await, None | Some(431)));
    assert_eq!(status(&other, &whole).await, 101);

    // Clients that say nothing do not keep others out.
    let address = first.strip_prefix("http://").unwrap().split('/').next().unwrap();
    let mut silent = Vec::new();
    for _ in 0..300 {
        silent.push(TcpStream::connect(address).await.unwrap());
    }
    let third = url(&mut cri, print()).await;
    assert_eq!(status(&third, &whole).await, 101);
    drop(silent);

    let nothing = cri.runtime.exec(request(&id, &["/demo-app"], [false; 3])).await.unwrap_err();
    assert!(nothing.code() == Code::InvalidArgument && nothing.message().contains("stdin"), "{nothing}");
    let empty = cri.runtime.exec(request(&id, &[], [true; 3])).await.unwrap_err();
    assert!(empty.code() == Code::InvalidArgument && empty.message().contains("cmd"), "{empty}");
    let unknown = cri.runtime.exec(request("absent", &["/demo-app"], [true; 3])).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound, "{unknown}");
    // So many URLs that were not used are kept, and no more.
    let mut refused = None;
    for _ in 0..2000 {
        if let Err(status) = cri.runtime.exec(print()).await {
            refused = Some(status);
            break;
        }
    }
    assert_eq!(refused.unwrap().code(), Code::ResourceExhausted);
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn frames_that_make_no_sense_end_the_connection_and_nothing_else() {
    let (host, mut cri) = host().await;
    let (pod, id) = running(&host, &mut cri).await;
    let frames: [&[u8]; 5] = [
        b"GET / HTTP/1.1\r\n\r\n",
        // Of version 2; with a block that is no zlib stream; with a block of 16 MiB; cut off.
        &[0x80, 2, 0, 1, 0, 0, 0, 0],
        &[0x80, 3, 0, 1, 0, 0, 0, 14, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4],
        &[0x80, 3, 0, 1, 0, 0xff, 0xff, 0xff],
        &[0x80, 3, 0],
    ];
    for bytes in frames {
        let url = url(&mut cri, request(&id, &["/demo-app", "sleep", "forever"], [true; 3])).await;
        let mut client = Client::of(&url, EXEC).await;
        client.raw(bytes).await;
        client.end().await;
        assert!(ends_within(&mut client).await, "{bytes:?}");
        // Also when the program runs.
        let (mut client, _) =
            exec(&mut cri, request(&id, &["/demo-app", "sleep", "forever"], [true; 3])).await;
        eventually("it runs", || (children(&host).len() == 2).then_some(())).await;
        client.raw(bytes).await;
        client.end().await;
        assert!(ends_within(&mut client).await, "{bytes:?}");
        eventually("it is killed", || (children(&host).len() == 1).then_some(())).await;
    }
    // A stream that is not known, and one that is there already, are refused; a ping is answered.
    let wanted = request(&id, &["/demo-app", "print", "x"], [false, true, false]);
    let mut client = Client::of(&url(&mut cri, wanted).await, EXEC).await;
    let unknown = client.open(&[("streamtype", "unknown")]).await;
    assert_eq!(client.next().await, Some(Frame::Reset { id: unknown }));
    let error = client.open(&[("streamtype", "error")]).await;
    assert_eq!(client.next().await, Some(Frame::Accepted { id: error }));
    let again = client.open(&[("streamtype", "error")]).await;
    assert_eq!(client.next().await, Some(Frame::Reset { id: again }));
    client.ping(7).await;
    assert_eq!(client.next().await, Some(Frame::Ping { id: 7 }));
    let stdout = client.open(&[("streamtype", "stdout")]).await;
    assert_eq!(client.next().await, Some(Frame::Accepted { id: stdout }));
    let (streams, status) = all(&mut client, &HashMap::from([("error", error), ("stdout", stdout)])).await;
    assert_eq!((streams["stdout"].as_slice(), status), (&b"x\n"[..], success()));
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

/// A pod that serves its /etc at port 80 of 127.0.0.1, with the pid of its container's first process.
pub(crate) async fn serving() -> (Host, Cri, String, i32) {
    let (host, mut cri) = host().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let id = cri.create(&pod, container("c", &["/demo-app", "serve", "127.0.0.1:80", "/etc"])).await.unwrap();
    cri.start(&id).await.unwrap();
    let first = children(&host)[0];
    set_loopback_up(&format!("/proc/{first}/ns/net"));
    (host, cri, pod, first)
}

#[tokio::test]
async fn a_port_of_a_pod_is_reached() {
    let (host, mut cri, pod, first) = serving().await;
    let wanted = PortForwardRequest { pod_sandbox_id: pod.clone(), port: vec![80, 81] };
    let url = cri.runtime.port_forward(wanted).await.unwrap().into_inner().url;
    let mut client = Client::of(&url, PORT_FORWARD).await;
    let passwd = std::fs::read(format!("/proc/{first}/root/etc/passwd")).unwrap();
    for request in ["1", "2"] {
        let (error, data) = pair(&mut client, "80", request).await;
        client.data(data, b"GET /passwd HTTP/1.0\r\n\r\n", true).await;
        let (answer, problem) = both(&mut client, data, error).await;
        assert!(answer.ends_with(&passwd), "{}", String::from_utf8_lossy(&answer));
        assert_eq!(problem, "");
    }
    for (port, reason) in [("81", "Connection refused"), ("82", "did not name it")] {
        let (error, data) = pair(&mut client, port, "3").await;
        let (answer, problem) = both(&mut client, data, error).await;
        assert!(answer.is_empty() && problem.starts_with(&format!("port {port} of the pod: ")), "{problem}");
        assert!(problem.contains(reason), "{problem}");
    }
    // A port must be a number, and streams of a pair of one port.
    let wrong = client.open(&[("streamtype", "data"), ("port", "0"), ("requestid", "4")]).await;
    assert_eq!(client.next().await, Some(Frame::Reset { id: wrong }));
    let error = client.open(&[("streamtype", "error"), ("port", "80"), ("requestid", "5")]).await;
    assert_eq!(client.next().await, Some(Frame::Accepted { id: error }));
    let wrong = client.open(&[("streamtype", "data"), ("port", "81"), ("requestid", "5")]).await;
    assert_eq!(client.next().await, Some(Frame::Reset { id: wrong }));

    // So many connections of one client, and no more. Nothing accepts them.
    let network = linux::netns::NetNs::open(Path::new(&format!("/proc/{first}/ns/net"))).unwrap();
    let _listener = network.run(|| std::net::TcpListener::bind("127.0.0.1:90")).unwrap().unwrap();
    let wanted = PortForwardRequest { pod_sandbox_id: pod.clone(), port: Vec::new() };
    let url = cri.runtime.port_forward(wanted).await.unwrap().into_inner().url;
    let mut client = Client::of(&url, PORT_FORWARD).await;
    for number in 0..256 {
        pair(&mut client, "90", &number.to_string()).await;
    }
    let refused = client.open(&[("streamtype", "data"), ("port", "90"), ("requestid", "256")]).await;
    loop {
        match client.next().await {
            Some(Frame::Reset { id }) if id == refused => break,
            Some(_) => {}
            None => panic!("the connection ended"),
        }
    }
    drop(client);
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

pub(crate) type WebSocket = WebSocketStream<TcpStream>;

pub(crate) async fn websocket(url: &str, protocol: &str) -> WebSocket {
    let head = format!(
        "GET Connection: keep-alive, Upgrade\r\nUpgrade: WebSocket\r\nSec-WebSocket-Version: 13\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Protocol: v0, {protocol}\r\n"
    );
    let (stream, status) = connect(url, &head).await;
    assert_eq!(status, 101);
    WebSocketStream::from_raw_socket(stream, Role::Client, None).await
}

pub(crate) async fn say(client: &mut WebSocket, channel: u8, bytes: &[u8]) {
    client.send(Message::binary([&[channel], bytes].concat())).await.unwrap();
}

/// What came on each channel until the server closed.
pub(crate) async fn heard(
    client: &mut (impl Stream<Item = Result<Message, tungstenite::Error>> + Unpin),
) -> HashMap<u8, Vec<u8>> {
    let mut channels: HashMap<u8, Vec<u8>> = HashMap::new();
    let all = async {
        while let Some(Ok(message)) = client.next().await {
            if let Message::Binary(bytes) = message {
                channels.entry(bytes[0]).or_default().extend(&bytes[1..]);
            }
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(20), all).await.unwrap();
    channels
}

#[tokio::test]
async fn a_program_has_its_streams_over_websocket() {
    let (host, mut cri) = host().await;
    let (pod, id) = running(&host, &mut cri).await;
    let url_of_copy = url(&mut cri, request(&id, &["/demo-app", "copy"], [true; 3])).await;
    let mut client = websocket(&url_of_copy, EXEC_BY_WEBSOCKET).await;
    let sent: Vec<u8> = (0..50_000_u32).flat_map(u32::to_le_bytes).collect();
    for piece in sent.chunks(30_000) {
        say(&mut client, 0, piece).await;
    }
    // The end of stdin.
    say(&mut client, 255, &[0]).await;
    let channels = heard(&mut client).await;
    assert!(channels[&1] == sent);
    assert_eq!(serde_json::from_slice::<Value>(&channels[&3]).unwrap(), success());

    let wanted = ExecRequest { tty: true, ..request(&id, &["/demo-app", "terminal"], [true, true, false]) };
    let mut client = websocket(&url(&mut cri, wanted).await, EXEC_BY_WEBSOCKET).await;
    say(&mut client, 4, br#"{"Width":120,"Height":40}"#).await;
    let mut said: Vec<u8> = Vec::new();
    while !said.windows(8).any(|window| window == b"40 rows\r") {
        if let Message::Binary(bytes) = client.next().await.unwrap().unwrap() {
            said.extend(&bytes[1..]);
        }
    }
    say(&mut client, 0, b"\x03").await;
    let channels = heard(&mut client).await;
    let status: Value = serde_json::from_slice(&channels[&3]).unwrap();
    assert_eq!(status["details"]["causes"][0]["message"], "130");

    // Messages that make no sense end the connection, and the program.
    for wrong in [Message::text("x"), Message::binary(Vec::new()), Message::binary(vec![0; 2 << 20])] {
        let sleeps = request(&id, &["/demo-app", "sleep", "forever"], [true; 3]);
        let mut client = websocket(&url(&mut cri, sleeps).await, EXEC_BY_WEBSOCKET).await;
        eventually("it runs", || (children(&host).len() == 2).then_some(())).await;
        let _the_server_may_have_closed = client.send(wrong).await;
        heard(&mut client).await;
        eventually("it is killed", || (children(&host).len() == 1).then_some(())).await;
    }
    let other = url(&mut cri, request(&id, &["/demo-app", "print", "x"], [false, true, true])).await;
    let upgrade =
        "GET Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Protocol: v5.channel.k8s.io\r\n";
    assert_eq!(answer(&other, upgrade).await, Some(400), "without a key");
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn clients_whose_websocket_kubelet_passes_on_have_their_streams_too() {
    let (host, mut cri) = host().await;
    let (pod, id) = running(&host, &mut cri).await;
    let copy = request(&id, &["/demo-app", "copy"], [true; 3]);
    let mut client = websocket(&url(&mut cri, copy).await, V4_BY_WEBSOCKET).await;
    // Such clients wait for the first message, and have no end of stdin.
    assert_eq!(client.next().await.unwrap().unwrap(), Message::binary(vec![1]));
    say(&mut client, 255, &[0]).await;
    client.send(Message::text("\0text, ")).await.unwrap();
    say(&mut client, 0, b"bytes").await;
    let mut said: Vec<u8> = Vec::new();
    while said != b"text, bytes" {
        if let Message::Binary(bytes) = client.next().await.unwrap().unwrap() {
            assert_eq!(bytes[0], 1);
            said.extend(&bytes[1..]);
        }
    }
    client.close(None).await.unwrap();
    eventually("the program ends with its client", || (children(&host).len() == 1).then_some(())).await;

    let fails = request(&id, &["/demo-app", "exit", "3"], [false, false, true]);
    let mut client = websocket(&url(&mut cri, fails).await, V4_BY_WEBSOCKET).await;
    let channels = heard(&mut client).await;
    assert_eq!(channels.get(&2), Some(&Vec::new()), "the lowest channel that it reads");
    let status: Value = serde_json::from_slice(&channels[&3]).unwrap();
    assert_eq!(status["details"]["causes"][0]["message"], "3");

    let prints = request(&id, &["/demo-app", "print", "x"], [false, true, false]);
    let both = url(&mut cri, prints).await;
    let mut client = websocket(&both, "v4.channel.k8s.io, v5.channel.k8s.io").await;
    assert_eq!(client.next().await.unwrap().unwrap(), Message::binary(b"\x01x\n".as_slice()), "v5");
    heard(&mut client).await;
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_port_of_a_pod_is_reached_over_websocket() {
    let (host, mut cri, pod, first) = serving().await;
    let mut url = async |port: Vec<i32>| {
        let wanted = PortForwardRequest { pod_sandbox_id: pod.clone(), port };
        cri.runtime.port_forward(wanted).await.unwrap().into_inner().url
    };
    let mut client = websocket(&url(vec![80]).await, PORT_FORWARD_BY_WEBSOCKET).await;
    say(&mut client, 0, b"GET /passwd HTTP/1.0\r\n\r\n").await;
    let channels = heard(&mut client).await;
    let passwd = std::fs::read(format!("/proc/{first}/root/etc/passwd")).unwrap();
    assert!(channels[&0].starts_with(&80_u16.to_le_bytes()) && channels[&0].ends_with(&passwd));
    assert_eq!(channels[&1], 80_u16.to_le_bytes());
    let mut client = websocket(&url(vec![81]).await, PORT_FORWARD_BY_WEBSOCKET).await;
    // Before it knows.
    for _ in 0..20 {
        let _refused = client.send(Message::binary(vec![0; 1000])).await;
    }
    let channels = heard(&mut client).await;
    let problem = String::from_utf8_lossy(&channels[&1][2..]).into_owned();
    assert!(
        problem.starts_with("port 81 of the pod: ") && problem.contains("Connection refused"),
        "{problem}"
    );
    let mut client = websocket(&url(vec![80, 81]).await, PORT_FORWARD_BY_WEBSOCKET).await;
    let problem = String::from_utf8_lossy(&heard(&mut client).await[&1]).into_owned();
    assert!(problem.contains("2 ports"), "{problem}");

    // A connection ends with the pod.
    let network = linux::netns::NetNs::open(Path::new(&format!("/proc/{first}/ns/net"))).unwrap();
    let _listener = network.run(|| std::net::TcpListener::bind("127.0.0.1:90")).unwrap().unwrap();
    let mut client = websocket(&url(vec![90]).await, PORT_FORWARD_BY_WEBSOCKET).await;
    let unused = url(vec![90]).await;
    let mut by_spdy = Client::of(&url(vec![90]).await, PORT_FORWARD).await;
    pair(&mut by_spdy, "90", "1").await;
    let stop = proto::cri::StopPodSandboxRequest { pod_sandbox_id: pod.clone() };
    cri.runtime.stop_pod_sandbox(stop).await.unwrap();
    heard(&mut client).await;
    assert!(ends_within(&mut by_spdy).await);
    let mut late = websocket(&unused, PORT_FORWARD_BY_WEBSOCKET).await;
    heard(&mut late).await;
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_client_need_not_wait_until_its_streams_are_accepted() {
    let (host, mut cri) = host().await;
    let (pod, id) = running(&host, &mut cri).await;
    let wanted = request(&id, &["/demo-app", "copy"], [true, true, false]);
    let mut client = Client::of(&url(&mut cri, wanted).await, EXEC).await;
    let stdin = client.open(&[("streamtype", "stdin")]).await;
    client.data(stdin, b"early", true).await;
    let error = client.open(&[("streamtype", "error")]).await;
    let stdout = client.open(&[("streamtype", "stdout")]).await;
    for id in [stdin, error, stdout] {
        assert_eq!(client.next().await, Some(Frame::Accepted { id }));
    }
    let ids = HashMap::from([("stdin", stdin), ("error", error), ("stdout", stdout)]);
    let (streams, status) = all(&mut client, &ids).await;
    assert_eq!((streams["stdout"].as_slice(), status), (&b"early"[..], success()));
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

pub(crate) async fn pair(client: &mut Client, port: &str, request: &str) -> (u32, u32) {
    let ids = ["error", "data"].map(|kind| [("streamtype", kind), ("port", port), ("requestid", request)]);
    let error = accepted(client, &ids[0]).await;
    let data = accepted(client, &ids[1]).await;
    (error, data)
}

/// Other connections may end meanwhile.
async fn accepted(client: &mut Client, headers: &[(&str, &str)]) -> u32 {
    let wanted = client.open(headers).await;
    loop {
        match client.next().await {
            Some(Frame::Accepted { id }) if id == wanted => return id,
            Some(Frame::Data { .. }) => {}
            other => panic!("{other:?}"),
        }
    }
}

pub(crate) async fn both(client: &mut Client, data: u32, error: u32) -> (Vec<u8>, String) {
    let (mut answer, mut problem, mut open) = (Vec::new(), Vec::new(), 2);
    while open > 0 {
        let Some(Frame::Data { id, bytes, is_last }) = client.next().await else { panic!("{problem:?}") };
        let to = if id == data { &mut answer } else { &mut problem };
        assert!(id == data || id == error);
        to.extend(bytes);
        open -= i32::from(is_last);
    }
    (answer, String::from_utf8(problem).unwrap())
}

#[tokio::test]
async fn a_port_of_a_pod_that_does_not_run_is_refused() {
    let (host, mut cri) = host().await;
    let wanted = |pod: &str, port: Vec<i32>| PortForwardRequest { pod_sandbox_id: pod.to_owned(), port };
    let unknown = cri.runtime.port_forward(wanted("absent", vec![80])).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound, "{unknown}");
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    for port in [0, -1, 65536] {
        let refused = cri.runtime.port_forward(wanted(&pod, vec![port])).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        assert!(refused.message().contains(&port.to_string()), "{refused}");
    }
    let stop = proto::cri::StopPodSandboxRequest { pod_sandbox_id: pod.clone() };
    cri.runtime.stop_pod_sandbox(stop).await.unwrap();
    let stopped = cri.runtime.port_forward(wanted(&pod, vec![80])).await.unwrap_err();
    assert_eq!(stopped.code(), Code::FailedPrecondition, "{stopped}");
    cri.remove_pod(&pod).await;
    host.assert_clean();
}
