//! What follows from a pod's object: its names and fields, its QoS class and limits, and its cgroup.

pub(crate) mod cgroup;
pub(crate) mod fields;
pub(crate) mod huge_pages;
pub(crate) mod names;
pub(crate) mod resources;
