//! Where the container runtime is: in this process behind its own socket, or
//! anywhere behind a given one.

use std::path::PathBuf;

use tokio::task::JoinSet;

use super::Error;

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
                // Of a killed kubelet: it may take connections for as long as a thread of it
                // waits for a volume's daemon.
                linux::atomic_file::discard(&socket)?;
                let path = socket.clone();
                background.spawn(async move {
                    // It ends with this process: its pods are in the hands of their shims.
                    match runtime::serve(config, &path, std::future::pending::<()>()).await {
                        Ok(()) => Error::EmbeddedEnded,
                        Err(error) => Error::Embedded(error),
                    }
                });
                Ok(socket)
            }
        }
    }
}
