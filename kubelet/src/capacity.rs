//! Whether the node has room for a pod: the node's capacity, what its pods hold, and its conditions
//! of pressure.

pub(crate) mod admission;
pub(crate) mod critical;
pub(crate) mod preemption;
pub mod pressure;
