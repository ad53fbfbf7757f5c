//! `exec`.

use std::io::{self, Write};

use proto::kubelet::ExecRequest;
use rustix::termios;

use super::remote_command::Session;
use super::{Error, client, containers, kinds};
use crate::config::{ContainerArgs, ExecArgs};

/// The program's exit code is that of the command (`Error::Exited`).
pub(super) async fn exec(args: &ExecArgs, out: &mut dyn Write) -> Result<(), Error> {
    let ContainerArgs { pod, container } = &args.of;
    let name = kinds::pod_name(&pod.pod)?;
    let mut kubelet = client::connect(&pod.root).await?;
    // As with kubectl, a program has no terminal without input, or if this command's input is none.
    let tty = args.tty && args.stdin && termios::isatty(io::stdin());
    if args.tty && args.stdin && !tty {
        let _no_reader = writeln!(io::stderr(), "Unable to use a TTY - input is not a terminal");
    }
    let container = containers::one(&mut kubelet, &pod.namespace, name, container).await?;
    let request = ExecRequest {
        namespace: pod.namespace.clone(),
        pod: name.to_owned(),
        container,
        command: args.command.clone(),
        stdin: args.stdin,
        tty,
    };
    let url = kubelet.exec(request.clone()).await?.into_inner().url;
    let again = async move || Ok(kubelet.exec(request).await?.into_inner().url);
    let session = Session { url, stdin: args.stdin, tty, sizes: tty, raw: tty };
    session.run(again, out).await
}
