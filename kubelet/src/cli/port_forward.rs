//! `port-forward`.

use std::io::{self, Write};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use proto::kubelet::PortForwardRequest;
use proto::kubelet::kubelet_client::KubeletClient;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::transport::Channel;

use super::streams::{channel, message};
use super::{Error, client, kinds, printable, streams};
use crate::config::{Forward, PortForwardArgs};

const PROTOCOL: &str = "v4.channel.k8s.io";

const DATA: u8 = 0;
const ERROR: u8 = 1;
/// Both channels begin with the port's number.
const PORT_BYTES: usize = 2;
/// After the end of the local client, the connection ends once the pod has sent nothing for so long.
const POD_ANSWERS: Duration = Duration::from_secs(30);

/// Forwards until the command is interrupted.
pub(super) async fn port_forward(args: &PortForwardArgs, out: &mut dyn Write) -> Result<(), Error> {
    let kubelet = client::connect(&args.of.root).await?;
    let mut accepting = JoinSet::new();
    for Forward { local, remote } in &args.ports {
        let request = PortForwardRequest {
            namespace: args.of.namespace.clone(),
            pod: kinds::pod_name(&args.of.pod)?.to_owned(),
            port: u32::from(*remote),
        };
        // So that a pod that cannot be reached is an error of the command.
        kubelet.clone().port_forward(request.clone()).await?;
        for listener in listen(*local).await? {
            let address = listener.local_addr().map_err(Error::Output)?;
            writeln!(out, "Forwarding from {address} -> {remote}")
                .and_then(|()| out.flush())
                .map_err(Error::Output)?;
            accepting.spawn(accept(listener, kubelet.clone(), request.clone()));
        }
    }
    accepting.join_all().await;
    Ok(())
}

/// On 127.0.0.1, and on ::1 where the node has it. `local` 0: a port that the kernel chooses.
async fn listen(local: u16) -> Result<Vec<TcpListener>, Error> {
    let failed = |source| Error::Listen { port: local, source };
    let v4 = TcpListener::bind((Ipv4Addr::LOCALHOST, local)).await.map_err(failed)?;
    let port = v4.local_addr().map_err(failed)?.port();
    let v6 = TcpListener::bind((Ipv6Addr::LOCALHOST, port)).await.ok();
    Ok([Some(v4), v6].into_iter().flatten().collect())
}

async fn accept(listener: TcpListener, kubelet: KubeletClient<Channel>, request: PortForwardRequest) {
    loop {
        let (kubelet, request) = (kubelet.clone(), request.clone());
        match listener.accept().await {
            Ok((stream, _)) => drop(tokio::spawn(async move {
                if let Err(error) = forward(stream, kubelet, request).await {
                    warn(&super::describe_error(&error));
                }
            })),
            Err(error) => {
                warn(&format!("accept a connection: {error}"));
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            }
        }
    }
}

fn warn(text: &str) {
    let _no_reader = writeln!(io::stderr(), "{}", printable::printable(text));
}

async fn forward(
    stream: TcpStream,
    mut kubelet: KubeletClient<Channel>,
    request: PortForwardRequest,
) -> Result<(), Error> {
    let url = kubelet.port_forward(request).await?.into_inner().url;
    let (mut to, mut from) = streams::connect(&url, PROTOCOL).await?.split();
    let (mut read, mut write) = stream.into_split();
    let (heard, mut pod_sends) = watch::channel(());
    let sending = async {
        let mut piece = vec![0; 32 << 10];
        loop {
            match read.read(&mut piece).await {
                // The protocol has no end of one direction, and the pod may still answer.
                Ok(0) => {
                    while tokio::time::timeout(POD_ANSWERS, pod_sends.changed()).await.is_ok() {}
                    return Ok(());
                }
                Ok(length) => to.send(message(DATA, &piece[..length])).await.map_err(io::Error::other)?,
                Err(error) => return Err(error),
            }
        }
    };
    let receiving = async {
        let (mut begun, mut problem) = ([0; 2], Vec::new());
        while let Some(received) = from.next().await {
            let received = received.map_err(io::Error::other)?;
            heard.send_replace(());
            let Some((name @ (DATA | ERROR), mut bytes)) = channel(&received) else { continue };
            let begun = &mut begun[usize::from(name)];
            let skipped = (PORT_BYTES - *begun).min(bytes.len());
            (*begun, bytes) = (*begun + skipped, &bytes[skipped..]);
            match name {
                DATA => write.write_all(bytes).await?,
                _ => problem.extend(bytes),
            }
        }
        Ok(problem)
    };
    let problem = tokio::select! {
        ended = sending => ended.map(|()| Vec::new()),
        ended = receiving => ended,
    };
    let problem = problem.map_err(|source| Error::Streams { url, source })?;
    if problem.is_empty() {
        return Ok(());
    }
    Err(Error::Exec { message: String::from_utf8_lossy(&problem).into_owned() })
}
