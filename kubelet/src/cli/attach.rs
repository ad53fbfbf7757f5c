//! `attach`.

use std::io::{self, Write};

use proto::kubelet::{AttachRequest, AttachedAt};
use rustix::termios;

use super::remote_command::Session;
use super::{Error, client, containers, kinds};
use crate::command_line::called_as::called_as;
use crate::config::{AttachArgs, ContainerArgs};

/// Ends with the container, and, with `-i`, with stdin.
pub(super) async fn attach(args: &AttachArgs, out: &mut dyn Write) -> Result<(), Error> {
    let ContainerArgs { pod, container } = &args.of;
    let name = kinds::pod_name(&pod.pod)?;
    let mut kubelet = client::connect(&pod.root).await?;
    let container = containers::one(&mut kubelet, &pod.namespace, name, container).await?;
    let request = AttachRequest {
        namespace: pod.namespace.clone(),
        pod: name.to_owned(),
        container,
        stdin: args.stdin,
    };
    let attached = kubelet.attach(request.clone()).await?.into_inner();
    let AttachedAt { url, container, tty, stdin, restarts } = attached;
    let again = async move || Ok(kubelet.attach(request).await?.into_inner().url);
    let hint = |text: &str| {
        if !args.quiet {
            let _no_reader = writeln!(io::stderr(), "{text}");
        }
    };
    let has_terminal = args.tty && args.stdin && termios::isatty(io::stdin());
    if args.tty && !tty {
        hint(&format!("error: Unable to use a TTY - container {container} did not allocate one"));
    } else if args.tty && !has_terminal {
        hint("Unable to use a TTY - input is not a terminal");
    }
    if args.stdin && !stdin {
        hint(&format!("container {container} takes no input: its manifest has no stdin: true"));
    }
    let raw = has_terminal && tty && stdin;
    if raw {
        hint("If you don't see a command prompt, try pressing enter.");
    }
    Session { url, stdin, tty, sizes: raw, raw }.run(again, out).await?;
    if raw && restarts && !args.quiet {
        let resume = format!(
            "Session ended, resume using '{} attach {name} -c {container} -i -t' command when the pod is running",
            called_as()
        );
        writeln!(out, "{resume}").map_err(Error::Output)?;
    }
    Ok(())
}
