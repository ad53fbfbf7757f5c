//! Entry points of the fuzz targets in `fuzz/`: packets of each direction on both sockets.

use crate::wire::daemon::{DaemonPacket, DaemonRequest};
use crate::wire::standby::{Assignment, Takeover};
use crate::wire::{Counts, Entry, ReplyHeader, Request};

/// The first byte chooses the parser. What it accepts encodes to the same bytes.
pub fn keeper_packets(input: &[u8]) {
    let Some((parser, packet)) = input.split_first() else { return };
    match parser % 5 {
        0 => {
            if let Ok(request) = Request::decode(packet) {
                assert_eq!(request.encode(), packet);
            }
        }
        1 => reply(packet),
        2 => {
            if let Ok(request) = DaemonRequest::decode(packet) {
                assert_eq!(request.encode(), packet);
            }
        }
        3 => {
            if let Some((header, nodes)) = DaemonPacket::decode(packet) {
                assert_eq!(nodes.len(), usize::from(header.count));
                let nodes = nodes.into_iter().flat_map(u64::to_le_bytes);
                assert!(header.encode().into_iter().chain(nodes).eq(packet.iter().copied()));
            }
        }
        _ => {
            if let Some(assignment) = Assignment::decode(packet) {
                assert_eq!(assignment.encode(), packet);
            }
        }
    }
}

fn reply(packet: &[u8]) {
    let Some((header, body)) = ReplyHeader::decode(packet) else { return };
    assert_eq!(header.encode(), packet[..ReplyHeader::SIZE]);
    if let Some(entries) = Entry::decode_all(body, header.count) {
        assert!(entries.iter().flat_map(Entry::encode).eq(body.iter().copied()));
    }
    if let Some(takeovers) = Takeover::decode_all(body, header.count) {
        assert!(takeovers.iter().flat_map(Takeover::encode).eq(body.iter().copied()));
    }
    if let Some(counts) = Counts::decode(body) {
        assert_eq!(counts.encode(), body);
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn seeds_of_keeper_packets_hold() {
        tests::seeds::run("keeper_packets", super::keeper_packets);
    }

    /// Each seed cut at each length, and with each byte replaced by each value.
    #[test]
    fn neighbours_of_the_seeds_hold() {
        tests::seeds::run("keeper_packets", |seed| {
            (0..seed.len()).for_each(|length| super::keeper_packets(&seed[..length]));
            for at in 0..seed.len() {
                let mut neighbour = seed.to_vec();
                for byte in 0..=u8::MAX {
                    neighbour[at] = byte;
                    super::keeper_packets(&neighbour);
                }
            }
        });
    }
}
