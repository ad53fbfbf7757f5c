//! Packets of a daemon's socket. The daemon may be taken over by an attacker; the socket itself
//! says which volume it is for, so no packet names one.

use super::{Refusal, Wrong, u16_at, u32_at, u64_at};

/// Apart from that of the main socket: daemons run for long, and get sockets of newer keepers.
pub const VERSION: u16 = 1;
/// Nodes, and descriptors, in one packet.
pub const MOST_NODES: usize = 64;

/// From the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DaemonRequest {
    /// Holds the one descriptor beside the packet for this node, and closes an older one. There is
    /// no reply, unless it is refused.
    PutRemoved { node: u64 },
    /// Closes the descriptor of this node. There is no reply.
    DropRemoved { node: u64 },
    /// All nodes with their descriptors, then End. It replaces a listing that is not complete.
    ListRemoved { number: u64 },
    /// The kernel is to read and write the one descriptor beside the packet without the daemon. The
    /// reply is Registered, or NotRegistered; Refused from a keeper that does not know it.
    RegisterBacking { number: u64 },
    /// Ends a registration. There is no reply, unless it is refused.
    UnregisterBacking { backing: u32 },
}

/// The beginning of every packet to the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DaemonPacket {
    pub version: u16,
    pub kind: Kind,
    /// How many nodes follow, each with a descriptor, in the same order. Registered: one number, without a
    /// descriptor: that of the backing file.
    pub count: u16,
    /// Removed, End, Registered, NotRegistered: of the request. Refused: the node; 0 if the packet has none.
    pub number: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Removed,
    /// The listing is complete.
    End,
    /// Nothing has changed. With [`Refusal::Interrupted`], a listing ended early.
    Refused(Refusal),
    Registered,
    NotRegistered(Refusal),
}

impl DaemonRequest {
    /// version u16, operation u16, 0 u32, number u64.
    pub const SIZE: usize = 16;

    /// The node, the number of the listing or registration, or the backing file.
    pub fn number(&self) -> u64 {
        match *self {
            Self::PutRemoved { node } | Self::DropRemoved { node } => node,
            Self::ListRemoved { number } | Self::RegisterBacking { number } => number,
            Self::UnregisterBacking { backing } => backing.into(),
        }
    }

    pub fn encode(&self) -> [u8; Self::SIZE] {
        let operation: u16 = match self {
            Self::PutRemoved { .. } => 1,
            Self::DropRemoved { .. } => 2,
            Self::ListRemoved { .. } => 3,
            Self::RegisterBacking { .. } => 4,
            Self::UnregisterBacking { .. } => 5,
        };
        let mut packet = [0; Self::SIZE];
        packet[..2].copy_from_slice(&VERSION.to_le_bytes());
        packet[2..4].copy_from_slice(&operation.to_le_bytes());
        packet[8..].copy_from_slice(&self.number().to_le_bytes());
        packet
    }

    pub fn decode(packet: &[u8]) -> Result<Self, Wrong> {
        let number = if packet.len() < 16 { 0 } else { u64_at(packet, 8) };
        let wrong = |refusal| Wrong { number, refusal };
        if packet.len() >= 2 && u16_at(packet, 0) != VERSION {
            return Err(wrong(Refusal::Version));
        }
        if packet.len() != Self::SIZE {
            return Err(wrong(Refusal::Size));
        }
        let request = match u16_at(packet, 2) {
            1 => Self::PutRemoved { node: number },
            2 => Self::DropRemoved { node: number },
            3 => Self::ListRemoved { number },
            4 => Self::RegisterBacking { number },
            5 => Self::UnregisterBacking {
                backing: u32::try_from(number).map_err(|_| wrong(Refusal::Unused))?,
            },
            _ => return Err(wrong(Refusal::Operation)),
        };
        if u32_at(packet, 4) != 0 {
            return Err(wrong(Refusal::Unused));
        }
        Ok(request)
    }
}

impl DaemonPacket {
    /// version u16, kind u16, count u16, refusal u16, number u64.
    pub const HEADER: usize = 16;
    pub const MOST_BYTES: usize = Self::HEADER + 8 * MOST_NODES;

    pub fn encode(&self) -> [u8; Self::HEADER] {
        let (kind, refusal) = match self.kind {
            Kind::Removed => (1_u16, 0),
            Kind::End => (2, 0),
            Kind::Refused(refusal) => (3, refusal as u16),
            Kind::Registered => (4, 0),
            Kind::NotRegistered(refusal) => (5, refusal as u16),
        };
        let mut packet = [0; Self::HEADER];
        packet[..2].copy_from_slice(&self.version.to_le_bytes());
        packet[2..4].copy_from_slice(&kind.to_le_bytes());
        packet[4..6].copy_from_slice(&self.count.to_le_bytes());
        packet[6..8].copy_from_slice(&refusal.to_le_bytes());
        packet[8..].copy_from_slice(&self.number.to_le_bytes());
        packet
    }

    /// The packet and its nodes. `None` for a packet that no keeper of this version sends.
    pub fn decode(packet: &[u8]) -> Option<(Self, Vec<u64>)> {
        let (header, body) = packet.split_at_checked(Self::HEADER)?;
        let (kind, refusal, count) = (u16_at(header, 2), u16_at(header, 6), u16_at(header, 4));
        let kind = match (kind, refusal) {
            (1, 0) => Kind::Removed,
            (2, 0) => Kind::End,
            (3, refusal) => Kind::Refused(Refusal::from_number(refusal)?),
            (4, 0) => Kind::Registered,
            (5, refusal) => Kind::NotRegistered(Refusal::from_number(refusal)?),
            _ => return None,
        };
        let (nodes, rest) = body.as_chunks::<8>();
        let has_nodes = nodes.len() == usize::from(count) && rest.is_empty();
        let may_have_nodes = match kind {
            Kind::Removed => usize::from(count) <= MOST_NODES,
            Kind::Registered => count == 1,
            Kind::End | Kind::Refused(_) | Kind::NotRegistered(_) => count == 0,
        };
        let version = u16_at(header, 0);
        if version != VERSION || !has_nodes || !may_have_nodes {
            return None;
        }
        let nodes = nodes.iter().map(|node| u64::from_le_bytes(*node)).collect();
        Some((Self { version, kind, count, number: u64_at(header, 8) }, nodes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_the_same_when_it_is_read_again() {
        for request in [
            DaemonRequest::PutRemoved { node: u64::MAX },
            DaemonRequest::DropRemoved { node: 0 },
            DaemonRequest::ListRemoved { number: 5 },
            DaemonRequest::RegisterBacking { number: 6 },
            DaemonRequest::UnregisterBacking { backing: u32::MAX },
        ] {
            assert_eq!(DaemonRequest::decode(&request.encode()), Ok(request));
        }
        let put = DaemonRequest::PutRemoved { node: 258 }.encode();
        assert_eq!(put, [1, 0, 1, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn a_wrong_request_is_refused_for_its_first_fault() {
        let put = DaemonRequest::PutRemoved { node: 7 }.encode();
        let with = |at: usize, byte: u8| {
            let mut packet = put.to_vec();
            packet[at] = byte;
            packet
        };
        for (packet, number, refusal) in [
            (Vec::new(), 0, Refusal::Size),
            (put[..15].to_vec(), 0, Refusal::Size),
            ([&put[..], &[0]].concat(), 7, Refusal::Size),
            (with(0, 9), 7, Refusal::Version),
            (with(2, 0), 7, Refusal::Operation),
            (with(2, 6), 7, Refusal::Operation),
            (with(7, 1), 7, Refusal::Unused),
        ] {
            assert_eq!(DaemonRequest::decode(&packet), Err(Wrong { number, refusal }), "{packet:?}");
        }
    }

    #[test]
    fn a_packet_is_the_same_when_it_is_read_again() {
        for (kind, nodes) in [
            (Kind::Removed, vec![1, u64::MAX]),
            (Kind::End, vec![]),
            (Kind::Refused(Refusal::Full), vec![]),
            (Kind::Registered, vec![3]),
            (Kind::NotRegistered(Refusal::PathOnly), vec![]),
        ] {
            let count = u16::try_from(nodes.len()).unwrap();
            let header = DaemonPacket { version: VERSION, kind, count, number: 9 };
            let mut packet = header.encode().to_vec();
            packet.extend(nodes.iter().flat_map(|node| node.to_le_bytes()));
            assert_eq!(DaemonPacket::decode(&packet), Some((header, nodes)));
            packet.push(0);
            assert_eq!(DaemonPacket::decode(&packet), None);
        }
    }
}
