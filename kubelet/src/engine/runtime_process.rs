//! The container runtime's endpoint: embedded in this process with its own socket, or a given
//! socket.

use std::path::{Path, PathBuf};

use tokio::task::JoinSet;

use super::Error;
use crate::node::sockets;

/// In both cases the kubelet speaks CRI over a unix socket.
#[derive(Debug, Clone)]
pub enum RuntimeEndpoint {
    /// containerd's or CRI-O's socket.
    Remote(PathBuf),
    Embedded(Box<EmbeddedRuntime>),
}

/// The embedded runtime's configuration.
#[derive(Debug, Clone)]
pub struct EmbeddedRuntime {
    pub socket: PathBuf,
    pub config: runtime::Config,
}

impl RuntimeEndpoint {
    /// Starts the embedded runtime as a background task; returns its socket.
    pub(super) fn start(&self, background: &mut JoinSet<Error>) -> Result<PathBuf, Error> {
        match self {
            Self::Remote(socket) => Ok(socket.clone()),
            Self::Embedded(embedded) => {
                let EmbeddedRuntime { socket, config } = EmbeddedRuntime::clone(embedded);
                let (listener, socket) =
                    sockets::bind(&socket).map_err(|e| linux::Error::at("bind", &socket, e))?;
                let at = socket.clone();
                background.spawn(async move {
                    // Runs until this process exits; the shims keep its pods running.
                    match runtime::serve_on(config, listener, at, std::future::pending::<()>()).await {
                        Ok(()) => Error::EmbeddedEnded,
                        Err(error) => Error::Embedded(error),
                    }
                });
                Ok(socket)
            }
        }
    }

    /// Removes the socket that [`Self::start`] bound.
    pub(super) fn end(&self, socket: &Path) {
        if matches!(self, Self::Embedded(_)) {
            let _the_next_start_replaces_it = std::fs::remove_file(socket);
        }
    }
}
