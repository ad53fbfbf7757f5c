//! Messages of the hand-over and of the control socket.

use prost::Message;
use proto::control::{Reply, Request};
use proto::handover::{Answer, Hello, HelloReply};

/// A packet that is read as a message is the same when it is written and read again.
pub(crate) fn same_again(packet: &[u8]) {
    fn kept<M: Message + Default + PartialEq + std::fmt::Debug>(packet: &[u8]) {
        let Ok(message) = M::decode(packet) else { return };
        assert_eq!(M::decode(&*message.encode_to_vec()).as_ref(), Ok(&message));
    }
    kept::<Hello>(packet);
    kept::<HelloReply>(packet);
    kept::<Answer>(packet);
    kept::<Request>(packet);
    kept::<Reply>(packet);
}
