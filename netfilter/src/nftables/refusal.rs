//! Errors with a remedy: a chain with another hook, a dormant table, and a kernel that lacks a part
//! of nf_tables.

use std::fmt;
use std::io;

use nix::errno::Errno;

use super::{BaseChain, Family};
use linux::Error;

/// Why existing rules have no effect.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unreached {
    #[error(transparent)]
    Elsewhere(#[from] WrongHook),
    /// Its base chains have no hook until the flag is removed. Meanwhile the kernel refuses to add
    /// one (`EINVAL`).
    #[error("table {} {table} is dormant, its chains do nothing: wake it with `nft add table {} {table}`", family.name(), family.name())]
    Dormant { family: Family, table: String },
}

/// A chain without the required hook, so that packets do not reach it; or with a hook although
/// other chains must lead to it. The kernel cannot move a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrongHook {
    pub(super) family: Family,
    pub(super) table: String,
    pub(super) name: String,
    /// `None`: no hook.
    pub(super) found: Option<BaseChain>,
    /// `None`: no hook.
    pub(super) needed: Option<BaseChain>,
}

impl fmt::Display for WrongHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { family, table, name, found, needed } = self;
        let place = |base: &Option<BaseChain>| match base {
            Some(base) => format!("\"{base}\""),
            None => "in no hook".to_owned(),
        };
        let (found, needed) = (place(found), place(needed));
        write!(f, "chain {} {table} {name} is {found} and must be {needed}", family.name())
    }
}

impl std::error::Error for WrongHook {}

/// A part of nf_tables that the kernel was built without, or is too old for.
#[derive(Debug, thiserror::Error)]
#[error("this kernel's nf_tables lacks {what}")]
struct Unsupported {
    what: String,
}

/// Whether a commit failed because the kernel lacks a table's family, a chain type or an
/// expression. Then it has changed nothing, and a retry fails too.
pub fn is_unsupported(error: &Error) -> bool {
    error.source.get_ref().is_some_and(|source| source.is::<Unsupported>())
}

/// Whether a commit failed because of a [`WrongHook`]. Then it has changed nothing.
pub fn is_wrong_hook(error: &Error) -> bool {
    let unreached = error.source.get_ref().and_then(|source| source.downcast_ref());
    matches!(unreached, Some(Unreached::Elsewhere(_)))
}

/// The optional parts that a message needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Needs {
    Family(Family),
    ChainType(Family, String),
    /// Expressions besides those that every kernel with nf_tables has.
    Expressions(Family, Vec<String>),
}

/// Explains the error if the kernel returns only an errno.
pub(super) fn explain(error: io::Error, needs: Option<Needs>) -> io::Error {
    let what = match (needs, error.raw_os_error().map(Errno::from_raw)) {
        // EAFNOSUPPORT before Linux 4.16.
        (Some(Needs::Family(family)), Some(Errno::EOPNOTSUPP | Errno::EAFNOSUPPORT)) => {
            format!("tables of family {}", family.name())
        }
        (Some(Needs::ChainType(family, kind)), Some(Errno::ENOENT)) => {
            format!("chains of type {kind} in family {}", family.name())
        }
        (Some(Needs::Expressions(family, names)), Some(Errno::ENOENT)) => {
            format!("expression {} in family {}", names.join(" or "), family.name())
        }
        _ => return error,
    };
    io::Error::new(io::ErrorKind::Unsupported, Unsupported { what })
}
