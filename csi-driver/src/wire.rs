//! The gRPC services: CSI and plugin registration, validation of requests, status codes.

pub(crate) mod call;
pub(crate) mod controller;
pub(crate) mod counted;
pub(crate) mod identity;
pub(crate) mod node;
pub(crate) mod pages;
pub(crate) mod registration;
pub(crate) mod server;
pub(crate) mod status;
