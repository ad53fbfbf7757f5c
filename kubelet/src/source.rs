//! Sources of objects.
//!
//! A source writes to the store: [`Store::apply`] for an object as the source describes it,
//! [`Store::withdraw`] for one that it no longer describes. The engine follows the store and does
//! not depend on sources; `run` chooses them.
//!
//! [`Store::apply`]: crate::store::Store::apply
//! [`Store::withdraw`]: crate::store::Store::withdraw

mod manifests;

use std::fmt::Debug;
use std::pin::Pin;

pub use manifests::{Config, DirectorySource};

/// A running operation of a source.
pub type Task<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// The manifest directory and the clients' socket are sources; an API server could be another.
pub trait ObjectSource: Debug + Send {
    /// Reports all current objects. The engine starts after this, because it tears down running
    /// pods without an object.
    fn report_all(&mut self) -> Task<'_>;

    /// Reports changes until `ended` resolves.
    fn follow(self: Box<Self>, ended: Task<'static>) -> Task<'static>;
}
