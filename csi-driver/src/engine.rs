//! What each call does: decisions, and steps that can be undone.

pub mod admission;
pub(crate) mod attach;
pub(crate) mod daemons;
pub(crate) mod driver;
pub(crate) mod expand;
pub(crate) mod forgetting;
pub(crate) mod group;
pub(crate) mod hang;
pub(crate) mod health;
pub(crate) mod jobs;
pub(crate) mod locks;
pub(crate) mod mount_point;
pub(crate) mod node_of_state;
pub(crate) mod park;
pub(crate) mod parking;
pub(crate) mod places;
pub(crate) mod probe;
pub(crate) mod provision;
pub(crate) mod publish;
pub(crate) mod reconcile;
pub(crate) mod serving;
pub(crate) mod side_by_side;
pub(crate) mod snapshots;
pub(crate) mod stage;
pub(crate) mod statistics;
