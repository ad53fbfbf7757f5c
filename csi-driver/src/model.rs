//! Records, parameters, ids and limits. No I/O.

pub(crate) mod access_mode;
pub(crate) mod calls;
pub(crate) mod capability;
pub(crate) mod capacity;
pub(crate) mod counts;
pub(crate) mod ids;
pub(crate) mod launch;
pub(crate) mod limits;
pub(crate) mod name;
pub(crate) mod parameters;
pub(crate) mod policies;
pub(crate) mod records;
pub(crate) mod settings;
pub(crate) mod sizes;
pub(crate) mod snapshot_mode;
pub(crate) mod topology;
