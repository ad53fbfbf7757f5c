//! What clients of Kubernetes need of WebSocket: port-forward by SPDY in its messages, and a code at the end.

use std::net::Ipv4Addr;

use futures_util::{SinkExt, StreamExt};
use proto::cri::{ExecRequest, PortForwardRequest};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;

use super::exec::running;
use super::spdy_client::{Client, ends_within};
use super::streams::{WebSocket, both, host, pair, serving, websocket};

const TUNNEL: &str = "SPDY/3.1+portforward.k8s.io";

/// A client of SPDY whose bytes a WebSocket carries, in messages of one to seven bytes. The task ends with the
/// code of the server's end.
async fn through(mut socket: WebSocket) -> (Client, JoinHandle<Option<CloseCode>>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (mut far, _) = listener.accept().await.unwrap();
    let carrying = tokio::spawn(async move {
        let mut buffer = [0; 100];
        let mut is_open = true;
        loop {
            tokio::select! {
                read = far.read(&mut buffer), if is_open => {
                    let length = read.unwrap_or(0);
                    is_open = length > 0;
                    if !is_open {
                        let _the_server_was_faster = socket.close(None).await;
                    }
                    for piece in buffer[..length].chunks(7) {
                        socket.send(Message::binary(piece.to_vec())).await.unwrap();
                    }
                }
                message = socket.next() => match message {
                    Some(Ok(Message::Binary(bytes))) => far.write_all(&bytes).await.unwrap(),
                    Some(Ok(Message::Close(frame))) => return frame.map(|frame| frame.code),
                    Some(Ok(_)) => {}
                    Some(Err(_)) | None => return None,
                },
            }
        }
    });
    (Client::over(near), carrying)
}

#[tokio::test]
async fn port_forward_works_by_spdy_in_a_websocket() {
    let (host, mut cri, pod, first) = serving().await;
    let passwd = std::fs::read(format!("/proc/{first}/root/etc/passwd")).unwrap();
    let mut url = async || {
        let wanted = PortForwardRequest { pod_sandbox_id: pod.clone(), port: Vec::new() };
        cri.runtime.port_forward(wanted).await.unwrap().into_inner().url
    };
    let (mut client, carrying) = through(websocket(&url().await, TUNNEL).await).await;
    for request in ["0", "1"] {
        let (error, data) = pair(&mut client, "80", request).await;
        client.data(data, b"GET /passwd HTTP/1.0\r\n\r\n", true).await;
        let (answer, problem) = both(&mut client, data, error).await;
        assert!(answer.ends_with(&passwd) && problem.is_empty(), "{problem}");
    }
    let (error, data) = pair(&mut client, "81", "2").await;
    let (_, problem) = both(&mut client, data, error).await;
    assert!(problem.contains("Connection refused"), "{problem}");
    // A client that goes is the end of the session.
    client.end().await;
    carrying.await.unwrap();

    // A client that wants the older protocol, too, gets the better one.
    let offered = format!("v4.channel.k8s.io, {TUNNEL}");
    let (mut client, carrying) = through(websocket(&url().await, &offered).await).await;
    pair(&mut client, "80", "0").await;
    let stop = proto::cri::StopPodSandboxRequest { pod_sandbox_id: pod.clone() };
    cri.runtime.stop_pod_sandbox(stop).await.unwrap();
    assert!(ends_within(&mut client).await);
    assert_eq!(carrying.await.unwrap(), Some(CloseCode::Normal));
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn the_end_of_an_exec_over_websocket_has_the_code_of_an_ordinary_end() {
    let (host, mut cri) = host().await;
    let (pod, id) = running(&host, &mut cri).await;
    let cmd = ["/demo-app", "print", "x"].map(str::to_owned).to_vec();
    let request =
        ExecRequest { container_id: id, cmd, tty: false, stdin: false, stdout: true, stderr: false };
    let url = cri.runtime.exec(request).await.unwrap().into_inner().url;
    let mut client = websocket(&url, "v5.channel.k8s.io").await;
    let code = loop {
        match client.next().await {
            Some(Ok(Message::Close(frame))) => break frame.map(|frame| frame.code),
            Some(Ok(_)) => {}
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(code, Some(CloseCode::Normal));
    cri.remove_pod(&pod).await;
    host.assert_clean();
}
