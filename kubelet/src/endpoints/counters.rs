//! What the endpoints count of themselves.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// By path, method and status code. The paths and methods are those of routes, so there are few.
type Requests = BTreeMap<(&'static str, &'static str, u16), u64>;

#[derive(Debug, Default)]
pub(super) struct Counters {
    requests: Mutex<Requests>,
    unauthorized: AtomicU64,
    refused_connections: AtomicU64,
    streams: Arc<AtomicI64>,
}

/// A client with streams, for as long as it exists.
#[derive(Debug)]
pub(super) struct OpenStreams(Arc<AtomicI64>);

impl Drop for OpenStreams {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Counters {
    pub(super) fn answered(&self, path: &'static str, method: &hyper::Method, status: u16) {
        let method = if *method == hyper::Method::POST { "POST" } else { "GET" };
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        *requests.entry((path, method, status)).or_default() += 1;
    }

    pub(super) fn requests(&self) -> Requests {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn count_unauthorized(&self) {
        self.unauthorized.fetch_add(1, Ordering::Relaxed);
    }

    /// Requests without a token or with a wrong one.
    pub(super) fn unauthorized(&self) -> u64 {
        self.unauthorized.load(Ordering::Relaxed)
    }

    pub(super) fn count_refused_connection(&self) {
        self.refused_connections.fetch_add(1, Ordering::Relaxed);
    }

    /// Connections that were closed because there were too many.
    pub(super) fn refused_connections(&self) -> u64 {
        self.refused_connections.load(Ordering::Relaxed)
    }

    pub(super) fn open_streams(&self) -> OpenStreams {
        self.streams.fetch_add(1, Ordering::Relaxed);
        OpenStreams(Arc::clone(&self.streams))
    }

    /// Clients that have streams now.
    pub(super) fn streams(&self) -> i64 {
        self.streams.load(Ordering::Relaxed)
    }
}
