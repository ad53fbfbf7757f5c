//! Waiting for a change of links or addresses, by multicast of the kernel.

use std::future::Future;
use std::io;

use rtnetlink::MulticastGroup;
use tokio_stream::{Stream, StreamExt};

use super::Netlink;
use crate::netns::NetNs;
use crate::{Error, Result};

/// Which changes a watching socket hears of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    Links,
    Ipv6Addresses,
}

/// Reports that something of the watched sort changed in one namespace, never
/// what: who waits looks again at the state itself.
pub struct Changes {
    _socket: Netlink,
    events: Box<dyn Stream<Item = ()> + Send + Unpin>,
}

impl std::fmt::Debug for Changes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Changes").field("_socket", &self._socket).finish_non_exhaustive()
    }
}

impl Changes {
    /// Subscribes in `netns`; `None` means the calling thread's namespace.
    /// Every change after the return is reported.
    pub fn watch(netns: Option<&NetNs>, what: Watch) -> Result<Self> {
        let group = match what {
            Watch::Links => MulticastGroup::Link,
            Watch::Ipv6Addresses => MulticastGroup::Ipv6Ifaddr,
        };
        let opened = match netns {
            None => rtnetlink::new_multicast_connection(&[group]),
            Some(netns) => {
                let runtime = tokio::runtime::Handle::current();
                netns.run(|| {
                    let _registers_with_us = runtime.enter();
                    rtnetlink::new_multicast_connection(&[group])
                })?
            }
        };
        let (connection, handle, events) =
            opened.map_err(|e| Error::new("subscribe to netlink", format_args!("{what:?}"), e))?;
        Ok(Self {
            _socket: Netlink { handle, driver: tokio::spawn(connection) },
            events: Box::new(events.map(drop)),
        })
    }

    /// Evaluates `check` now and after every change, until it gives a value.
    pub async fn until<T, F>(&mut self, mut check: impl FnMut() -> F) -> Result<T>
    where
        F: Future<Output = Result<Option<T>>>,
    {
        loop {
            if let Some(found) = check().await? {
                return Ok(found);
            }
            if self.events.next().await.is_none() {
                return Err(Error::new(
                    "wait for netlink",
                    "event",
                    io::Error::from(io::ErrorKind::UnexpectedEof),
                ));
            }
        }
    }
}
