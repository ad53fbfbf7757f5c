//! The nodes that reach a volume's data.

use std::collections::HashMap;

/// Where the backend's volumes can be made and used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Topology {
    /// On every node that runs the driver; volumes have no topology.
    #[cfg_attr(not(test), expect(dead_code, reason = "for a backend whose data are not on one node"))]
    EveryNode,
    /// Only on the node with this segment, where the data are.
    OneNode(Segment),
}

/// A segment of a CSI topology.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) key: String,
    pub(crate) value: String,
}

impl Topology {
    /// The segments of CSI; `None`: no restriction.
    pub(crate) fn segments(&self) -> Option<HashMap<String, String>> {
        match self {
            Self::EveryNode => None,
            Self::OneNode(Segment { key, value }) => Some(HashMap::from([(key.clone(), value.clone())])),
        }
    }

    /// Whether volumes can be used everywhere that `wanted` describes.
    pub(crate) fn reaches(&self, wanted: &HashMap<String, String>) -> bool {
        match self {
            Self::EveryNode => true,
            Self::OneNode(own) => wanted.iter().all(|(key, value)| *key == own.key && *value == own.value),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_on_one_node_reach_only_its_segment() {
        let segments = |value: &str| HashMap::from([("topology.d/node".to_owned(), value.to_owned())]);
        let own = Segment { key: "topology.d/node".to_owned(), value: "n1".to_owned() };
        let topology = Topology::OneNode(own);
        assert_eq!(topology.segments(), Some(segments("n1")));
        assert!(topology.reaches(&segments("n1")));
        assert!(!topology.reaches(&segments("n2")));
        let mut narrower = segments("n1");
        narrower.insert("zone".to_owned(), "a".to_owned());
        assert!(!topology.reaches(&narrower));
        assert_eq!(Topology::EveryNode.segments(), None);
        assert!(Topology::EveryNode.reaches(&segments("n2")));
    }
}
