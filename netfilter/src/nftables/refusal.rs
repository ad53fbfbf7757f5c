//! Refusals that say what to do about them: a chain that hooks in elsewhere, a
//! dormant table, and a kernel that lacks a part of nf_tables.

use std::fmt;
use std::io;

use nix::errno::Errno;

use super::{BaseChain, Family};
use linux::Error;

/// Why rules do nothing though they are there.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unreached {
    #[error(transparent)]
    Elsewhere(#[from] WrongHook),
    /// Its base chains hook in nowhere until the flag is taken from it; the
    /// kernel adds none to it meanwhile (`EINVAL`).
    #[error("table {} {table} is dormant, its chains do nothing: wake it with `nft add table {} {table}`", family.name(), family.name())]
    Dormant { family: Family, table: String },
}

/// A chain that is there but not where packets would come by, or in a hook where
/// others are to lead to it. The kernel lets nobody move it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrongHook {
    pub(super) family: Family,
    pub(super) table: String,
    pub(super) name: String,
    /// `None`: in no hook.
    pub(super) found: Option<BaseChain>,
    /// `None`: in no hook.
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

/// What the kernel was built without, or is too old for.
#[derive(Debug, thiserror::Error)]
#[error("this kernel's nf_tables lacks {what}")]
struct Unsupported {
    what: String,
}

/// Whether a commit failed because the kernel lacks a table's family, a type of
/// chain or an expression. It has changed nothing then, and will not another time.
pub fn is_unsupported(error: &Error) -> bool {
    error.source.get_ref().is_some_and(|source| source.is::<Unsupported>())
}

/// Whether a commit failed, without a change, because of a [`WrongHook`].
pub fn is_wrong_hook(error: &Error) -> bool {
    let unreached = error.source.get_ref().and_then(|source| source.downcast_ref());
    matches!(unreached, Some(Unreached::Elsewhere(_)))
}

/// Of a message: what it cannot do without.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Needs {
    Family(Family),
    ChainType(Family, String),
    /// Beside those that every kernel with nf_tables has.
    Expressions(Family, Vec<String>),
}

/// The refusal, understood where the kernel only gives an errno for it.
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
