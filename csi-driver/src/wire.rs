//! What callers see: the services of CSI and of plugin registration, the checks of their requests, the codes of the answers.

pub(crate) mod call;
pub(crate) mod controller;
pub(crate) mod counted;
pub(crate) mod identity;
pub(crate) mod node;
pub(crate) mod pages;
pub(crate) mod registration;
pub(crate) mod server;
pub(crate) mod status;
