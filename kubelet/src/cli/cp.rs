//! `cp`: to and from a container, with its own tar, as kubectl does it.

mod exec;
mod pack;
mod unpack;

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf};

use tokio::sync::mpsc;

use super::printable::printable;
use super::{Error, client, containers};
use crate::config::{CopyArgs, CopyPlace};
use exec::Container;
use unpack::CopyName;

/// Pieces of a stream that wait.
const PIECES_KEPT: usize = 16;

pub(super) async fn cp(args: &CopyArgs) -> Result<(), Error> {
    let copying = async {
        match (&args.from, &args.to) {
            (CopyPlace::Here(from), CopyPlace::Container { namespace, pod, path }) => {
                upload(&container(args, namespace.as_deref(), pod).await?, args, from, path).await
            }
            (CopyPlace::Container { namespace, pod, path }, CopyPlace::Here(to)) => {
                download(&container(args, namespace.as_deref(), pod).await?, args, path, to).await
            }
            (CopyPlace::Here(_), CopyPlace::Here(_)) => {
                Err(Error::Usage("one of src or dest must be a remote file specification"))
            }
            (CopyPlace::Container { .. }, CopyPlace::Container { .. }) => {
                Err(Error::Usage("one of src or dest must be a local file specification"))
            }
        }
    };
    if args.timeout.is_zero() {
        return copying.await;
    }
    let too_long = Error::CopyTakesTooLong { seconds: args.timeout.as_secs_f64() };
    tokio::time::timeout(args.timeout, copying).await.unwrap_or(Err(too_long))
}

async fn container(args: &CopyArgs, namespace: Option<&str>, pod: &str) -> Result<Container, Error> {
    let mut kubelet = client::connect(&args.root).await?;
    let namespace = namespace.unwrap_or(&args.namespace).to_owned();
    let container = containers::one(&mut kubelet, &namespace, pod, &args.container).await?;
    Ok(Container { kubelet, namespace, pod: pod.to_owned(), container })
}

async fn upload(container: &Container, args: &CopyArgs, from: &Path, to: &str) -> Result<(), Error> {
    if from.symlink_metadata().is_err() {
        return Err(Error::NoSource { path: from.to_owned() });
    }
    let to = match container.run(&["test", "-d", to], None, None).await {
        Ok(()) => {
            let name = from.canonicalize().ok().and_then(|path| path.file_name().map(ToOwned::to_owned));
            // The link's own name, not that of its target.
            let name = from.file_name().map(ToOwned::to_owned).or(name);
            Path::new(to).join(name.unwrap_or_default())
        }
        // No directory, or a container without `test`.
        Err(Error::Exited { .. } | Error::Exec { .. }) => PathBuf::from(to),
        Err(error) => return Err(error),
    };
    let Some(name) = to.file_name().map(ToOwned::to_owned) else {
        return Err(Error::Usage("the destination has no file name"));
    };
    let dir = to.parent().map(|dir| dir.display().to_string()).filter(|dir| !dir.is_empty());
    let mut command = vec!["tar"];
    if args.no_preserve {
        command.extend(["--no-same-permissions", "--no-same-owner"]);
    }
    command.extend(["-xmf", "-"]);
    if let Some(dir) = &dir {
        command.extend(["-C", dir]);
    }
    let (pieces, input) = mpsc::channel(PIECES_KEPT);
    let source = from.to_owned();
    let packing = tokio::task::spawn_blocking(move || pack::pack(&source, Path::new(&name), pieces));
    let extracted = container.run(&command, Some(input), None).await.map_err(|e| container.needs_tar(e));
    let packed = packing.await.map_err(|e| Error::Output(io::Error::other(e)))?;
    match packed {
        // A container that stops reading ends the packing, so its own error says more.
        Err(Error::ReadFile { source, .. })
            if source.kind() == io::ErrorKind::BrokenPipe && extracted.is_err() =>
        {
            extracted
        }
        Err(error) => Err(error),
        Ok(()) => extracted,
    }
}

async fn download(container: &Container, args: &CopyArgs, from: &str, to: &Path) -> Result<(), Error> {
    let prefix = names(from)?;
    let (dir, copy) = if to.is_dir() {
        // The root has no name, and is no file.
        (to.to_owned(), CopyName::FileAs(prefix.last().cloned().unwrap_or_default()))
    } else {
        let Some(name) = to.file_name() else { return Err(Error::Usage("the destination has no file name")) };
        let dir = to.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        (dir.to_owned(), CopyName::As(name.to_owned()))
    };
    let target = unpack::Target::open(&dir, copy, prefix, args.no_preserve)?;
    let (output, pieces) = mpsc::channel(PIECES_KEPT);
    let unpacking = tokio::task::spawn_blocking(move || target.unpack(pieces));
    let packed = container.run(&["tar", "cf", "-", from], None, Some(output)).await;
    let unpacked = unpacking.await.map_err(|e| Error::Output(io::Error::other(e)))?;
    // An archive that ends too early is what tar's own error looks like here.
    packed.map_err(|e| container.needs_tar(e))?;
    let skipped = unpacked?;
    for warning in &skipped.shown {
        let _no_reader = writeln!(io::stderr(), "warning: skipping {}", printable(warning));
    }
    if skipped.more > 0 {
        let _no_reader = writeln!(io::stderr(), "warning: skipping {} more", skipped.more);
    }
    Ok(())
}

/// The names of a path in a container, as tar writes them.
fn names(path: &str) -> Result<Vec<OsString>, Error> {
    let components = Path::new(path).components();
    components
        .filter(|component| !matches!(component, Component::RootDir | Component::CurDir))
        .map(|component| match component {
            Component::Normal(name) => Ok(name.to_owned()),
            _ => Err(Error::Usage("a path in a container must not contain '..'")),
        })
        .collect()
}
