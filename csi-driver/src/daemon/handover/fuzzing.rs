//! What a daemon sends in the hand-over.

use linux::chain;
use linux::fd_passing::{PacketSocket, PeerCredentials};
use prost::Message;
use proto::handover::{Assignment, Hello, VERSIONS};
use proto::versions::Versions;

use super::{Expected, Offer, assign, dialled, greet};
use crate::daemon::untrusted_text::assert_is_fit;
use crate::error::Result;
use crate::model::ids::VolumeId;
use crate::model::limits;

const NONCE: &str = "right";

/// A byte with the length of Hello, Hello, and Answer. Only a daemon with the nonce and a common
/// version gets the volume, and its text in an error is one short line.
pub fn hello_and_answer(input: &[u8]) {
    let Some((length, rest)) = input.split_first() else { return };
    let (hello, answer) = rest.split_at(rest.len().min((*length).into()));
    let (driver, daemon) = PacketSocket::pair().expect("a pair of sockets");
    let send = |packet| daemon.send(packet, &[]).expect("a packet fits into the socket");
    [hello, answer].into_iter().for_each(send);
    let volume_id = VolumeId::from_key("0123456789abcdef0123456789abcdef").expect("32 digits");
    let expected = Expected { nonce: NONCE, process: None, time_limit: limits::HELLO };
    let offer = Offer {
        volume_id: &volume_id,
        launch: "pod ns/p with image i",
        assignment: Assignment::default(),
        descriptors: Vec::new(),
    };
    let peer = PeerCredentials { pid: std::process::id().cast_signed(), uid: 0, gid: 0 };
    match greet(&driver, peer, expected, limits::HELLO) {
        Err(reason) => assert_is_fit(&reason),
        Ok(found) => {
            let hello = Hello::decode(hello).expect("the driver has read it");
            assert_eq!(hello.nonce, NONCE);
            let versions = Versions::said(hello.oldest_version, hello.newest_version);
            assert_eq!(found.versions, versions);
            match dialled(driver, peer, found) {
                Ok(dialled) => {
                    assert!(VERSIONS.common(versions).is_some());
                    assert_error_is_fit(assign(dialled, &offer));
                }
                Err(reason) => {
                    assert_eq!(VERSIONS.common(versions), None);
                    assert_is_fit(&reason.to_string());
                }
            }
        }
    }
}

fn assert_error_is_fit<T>(result: Result<T>) {
    if let Err(error) = result {
        assert_is_fit(&chain(&error));
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn seeds_of_hello_and_answer_hold() {
        tests::seeds::run("hello_and_answer", super::hello_and_answer);
    }
}
