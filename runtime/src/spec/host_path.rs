//! Why a path of the host cannot be mounted.

use std::io;

#[derive(Debug, thiserror::Error)]
pub enum HostPathProblem {
    #[error(transparent)]
    Find(io::Error),
    #[error("it does not exist, and is not made because of its \"..\"")]
    ParentDir,
    #[error("this volume of a pod is not mounted")]
    NotMounted,
    #[error("it has no existing parent")]
    NoParent,
    #[error("create directory")]
    Create {
        #[source]
        source: rustix::io::Errno,
    },
}
