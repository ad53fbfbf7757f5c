//! exec, attach and port-forward: the connection is passed on to the runtime's streaming server.

use std::io::{Read, Write};

use tests::Sandbox;

use crate::client::{Asked, Place};
use crate::{get, node};

type Header = (&'static str, &'static str);

const WEBSOCKET: [Header; 5] = [
    ("Connection", "Upgrade"),
    ("Upgrade", "websocket"),
    ("Sec-WebSocket-Version", "13"),
    ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
    // A streaming server chooses the first that it knows.
    ("Sec-WebSocket-Protocol", "v5.channel.k8s.io, v4.channel.k8s.io"),
];
const SPDY: [Header; 3] =
    [("Connection", "Upgrade"), ("Upgrade", "SPDY/3.1"), ("X-Stream-Protocol-Version", "v4.channel.k8s.io")];

/// The next message of a server: its opcode and its bytes (RFC 6455, 5.2).
fn message(asked: &mut Asked) -> (u8, Vec<u8>) {
    let mut read = |length: usize| {
        let mut bytes = vec![0; length];
        asked.0.read_exact(&mut bytes).expect("a frame");
        bytes
    };
    let head = read(2);
    let length = match head[1] & 0x7f {
        126 => usize::from(u16::from_be_bytes(read(2).try_into().expect("two bytes"))),
        length => usize::from(length),
    };
    (head[0] & 0xf, read(length))
}

/// What a program wrote to stdout, and its status, a JSON text.
fn output(asked: &mut Asked) -> (String, String) {
    let (mut stdout, mut status) = (String::new(), String::new());
    loop {
        match message(asked) {
            (8, _) => return (stdout, status),
            (_, bytes) => match bytes.split_first() {
                Some((1, text)) => stdout.push_str(&String::from_utf8_lossy(text)),
                Some((3, text)) => status.push_str(&String::from_utf8_lossy(text)),
                _ => {}
            },
        }
    }
}

#[test]
fn a_program_is_run_by_websocket_through_the_kubelet() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let uid = node.get("pod", "web").expect("the pod")["metadata"]["uid"].as_str().expect("a uid").to_owned();
    for container in ["web/business".to_owned(), format!("web/{uid}/business")] {
        let path = format!(
            "/exec/default/{container}?command=/demo-app&command=print&command=good+day&output=1&error=1"
        );
        let mut asked = Place::unix(&node).send("GET", &path, &WEBSOCKET);
        let head = asked.head();
        assert_eq!(head.status, 101, "{head:?}");
        let chosen = head.header("sec-websocket-protocol");
        assert!(["v5.channel.k8s.io", "v4.channel.k8s.io"].contains(&chosen), "{head:?}");
        assert_eq!(head.header("sec-websocket-accept"), "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
        let (stdout, status) = output(&mut asked);
        assert_eq!(stdout, "good day\n");
        assert!(status.contains("\"Success\""), "{status}");
    }
    let metrics = get(&node, "/metrics").text();
    assert!(metrics.contains("code=\"101\",long_running=\"true\",method=\"GET\",path=\"exec\""), "{metrics}");
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn spdy_is_answered_by_the_runtimes_server() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let place = Place::unix(&node);
    for path in [
        "/exec/default/web/business?command=/demo-app&command=sleep&command=forever&output=1",
        "/attach/default/web/business?output=1",
    ] {
        let head = place.send("POST", path, &SPDY).head();
        assert_eq!((head.status, head.header("upgrade")), (101, "SPDY/3.1"), "{path}: {head:?}");
        assert_eq!(head.header("x-stream-protocol-version"), "v4.channel.k8s.io", "{path}");
    }
    let ports = [SPDY[0], SPDY[1], ("X-Stream-Protocol-Version", "portforward.k8s.io")];
    let mut asked = place.send("POST", "/portForward/default/web", &ports);
    assert_eq!(asked.head().status, 101);
    // PING, an odd id, is answered by the same (SPDY/3.1, 2.6.5).
    let ping = [0x80, 3, 0, 6, 0, 0, 0, 4, 0, 0, 0, 1];
    asked.0.write_all(&ping).expect("sent");
    let mut pong = [0; 12];
    asked.0.read_exact(&mut pong).expect("an answer");
    assert_eq!(pong, ping);
    drop(asked);
    node.finish(&idle).expect("nothing is left");
}

#[test]
fn requests_that_no_stream_can_follow_are_refused() {
    let sandbox = Sandbox::new();
    let (node, idle) = node(&sandbox);
    let place = Place::unix(&node);
    let exec = "/exec/default/web/business?command=/demo-app&output=1";
    let cases: [(&str, &[Header], u16, &str); 7] = [
        (exec, &[], 400, "Upgrade request required"),
        ("/exec/default/web/business?command=x", &SPDY, 400, "at least 1 of stdin, stdout, stderr"),
        ("/exec/default/absent/business?command=x&output=1", &SPDY, 404, "pods \"absent\" not found"),
        (
            "/exec/default/web/other?command=x&output=1",
            &SPDY,
            404,
            "container other is not valid for pod web",
        ),
        ("/exec/default/web/0a1b/business?command=x&output=1", &SPDY, 404, "pods \"web\" not found"),
        ("/portForward/default/web?ports=0", &WEBSOCKET, 400, "port \"0\": a number from 1 to 65535"),
        // The runtime's own refusal.
        (exec, &[SPDY[0], SPDY[1], ("X-Stream-Protocol-Version", "v1.example")], 403, "v4.channel.k8s.io"),
    ];
    for (path, headers, status, words) in cases {
        let answer = place.send("POST", path, headers).read();
        assert!(answer.status == status && answer.text().contains(words), "{path}: {answer:?}");
    }
    node.finish(&idle).expect("nothing is left");
}
