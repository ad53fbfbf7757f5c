//! Where the container runtime is: in this process behind its own socket, or
//! anywhere behind a given one.

use std::path::{Path, PathBuf};

use tokio::task::JoinSet;

use super::Error;
use crate::sockets;

/// Either way the kubelet speaks CRI over a unix socket.
#[derive(Debug, Clone)]
pub enum RuntimeEndpoint {
    /// containerd's or CRI-O's socket.
    Remote(PathBuf),
    Embedded(Box<EmbeddedRuntime>),
}

/// What the embedded runtime is started with.
#[derive(Debug, Clone)]
pub struct EmbeddedRuntime {
    pub socket: PathBuf,
    pub config: runtime::Config,
}

impl RuntimeEndpoint {
    /// Starts the embedded runtime as one of the background tasks; returns the
    /// socket to talk to.
    pub(super) fn start(&self, background: &mut JoinSet<Error>) -> Result<PathBuf, Error> {
        match self {
            Self::Remote(socket) => Ok(socket.clone()),
            Self::Embedded(embedded) => {
                let EmbeddedRuntime { socket, config } = EmbeddedRuntime::clone(embedded);
                let (listener, socket) =
                    sockets::bind(&socket).map_err(|e| linux::Error::at("bind", &socket, e))?;
                let at = socket.clone();
                background.spawn(async move {
                    // It ends with this process: its pods are in the hands of their shims.
                    match runtime::serve_on(config, listener, at, std::future::pending::<()>()).await {
                        Ok(()) => Error::EmbeddedEnded,
                        Err(error) => Error::Embedded(error),
                    }
                });
                Ok(socket)
            }
        }
    }

    /// Takes away the socket that [`Self::start`] has bound.
    pub(super) fn end(&self, socket: &Path) {
        if matches!(self, Self::Embedded(_)) {
            let _the_next_start_replaces_it = std::fs::remove_file(socket);
        }
    }
}
