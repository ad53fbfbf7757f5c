//! Where objects come from.
//!
//! A source reports to the store: [`Store::apply`] takes an object as the source
//! describes it, [`Store::vanish`] one that the source no longer describes. The
//! engine knows no source, it follows the store; `run` chooses the sources.
//!
//! [`Store::apply`]: crate::standalone::store::Store::apply
//! [`Store::vanish`]: crate::standalone::store::Store::vanish

mod manifests;

use std::fmt::Debug;
use std::pin::Pin;

pub use manifests::{Config, DirectorySource};

/// Work of a source.
pub type Task<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// The manifest directory and the clients' socket are sources; an API server would be another.
pub trait ObjectSource: Debug + Send {
    /// Reports every object that the source describes now. The engine starts after this,
    /// because it tears down pods that run and have no object.
    fn report_all(&mut self) -> Task<'_>;

    /// Reports changes until `ended` resolves.
    fn follow(self: Box<Self>, ended: Task<'static>) -> Task<'static>;
}
