//! The state of a pod: what the runtime and the probes report (`observed`, `probe_results`), what
//! the pod needs next (`plan`), and what it reports (`status`). The last two do no I/O.

pub(crate) mod observed;
pub(crate) mod plan;
pub(crate) mod probe_results;
pub(crate) mod status;
