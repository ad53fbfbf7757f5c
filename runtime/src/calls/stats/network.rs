//! The network interfaces of a pod, as its namespace counts them.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use linux::netns::NetNs;
use proto::cri::{NetworkInterfaceUsage, NetworkUsage};

use super::value;
use crate::error::{Error, Result};
use crate::shim::protocol::now;
use crate::spec::pod::POD_INTERFACE;

/// In the namespace of the thread that reads it.
const COUNTERS: &str = "/proc/thread-self/net/dev";
/// Limit of that file: a pod with CAP_NET_ADMIN may make interfaces.
const MAX_BYTES: u64 = 64 << 10;

/// `None` if the namespace is gone.
pub(super) fn of(netns: &Path) -> Result<Option<NetworkUsage>> {
    let Ok(namespace) = NetNs::open(netns) else { return Ok(None) };
    let read = || {
        let mut text = Vec::new();
        File::open(COUNTERS)?.take(MAX_BYTES).read_to_end(&mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    };
    let text = namespace.run(read)?.map_err(|e| Error::io("read", Path::new(COUNTERS), e))?;
    Ok(Some(counters(&text)))
}

/// All but `lo`. The pod's own interface is the default one and not among the others.
fn counters(text: &str) -> NetworkUsage {
    let all = text.lines().filter_map(interface).filter(|interface| interface.name != "lo");
    let (mut default, others): (Vec<_>, Vec<_>) = all.partition(|interface| interface.name == POD_INTERFACE);
    NetworkUsage { timestamp: now(), default_interface: default.pop(), interfaces: others }
}

/// A line of proc_pid_net(5), `dev`: the name, eight counters of what was received and eight of
/// what was sent, of which the first is bytes and the third errors. `None` for other lines.
fn interface(line: &str) -> Option<NetworkInterfaceUsage> {
    let (name, counters) = line.split_once(':')?;
    let counters: Vec<u64> =
        counters.split_whitespace().map(|number| number.parse().ok()).collect::<Option<_>>()?;
    let [rx_bytes, _, rx_errors, _, _, _, _, _, tx_bytes, _, tx_errors, ..] = counters[..] else {
        return None;
    };
    Some(NetworkInterfaceUsage {
        name: name.trim().to_owned(),
        rx_bytes: value(rx_bytes),
        rx_errors: value(rx_errors),
        tx_bytes: value(tx_bytes),
        tx_errors: value(tx_errors),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pods_interface_is_the_default_one_and_lo_is_left_out() {
        let text = "Inter-|   Receive                                                |  Transmit\n \
                    face |bytes    packets errs drop fifo frame compressed multicast|bytes\n    \
                    lo:     840      10    0    0    0     0          0         0      840   10  0 0 0 0 0 0\n  \
                    eth0: 1146      15    2    0    0     0          0         0      936   12  3 0 0 0 0 0\n\
                    net1:1 2 0 0 0 0 0 0 7 0 0 0 0 0 0 0\ncut: 1 2 3\n";
        let found = counters(text);
        let default = found.default_interface.unwrap();
        let value = |value: Option<proto::cri::UInt64Value>| value.unwrap().value;
        assert_eq!(default.name, "eth0");
        assert_eq!((value(default.rx_bytes), value(default.rx_errors)), (1146, 2));
        assert_eq!((value(default.tx_bytes), value(default.tx_errors)), (936, 3));
        let others: Vec<_> = found.interfaces.iter().map(|interface| interface.name.as_str()).collect();
        assert_eq!(others, ["net1"]);
    }
}
