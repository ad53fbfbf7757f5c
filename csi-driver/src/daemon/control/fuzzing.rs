//! A daemon's replies to the driver's requests.

use std::sync::Arc;
use std::time::{Duration, Instant};

use linux::chain;
use linux::fd_passing::PacketSocket;

use super::{Control, Granted, PassingWrites, Quiesced};
use crate::daemon::notes::Hangs;
use crate::daemon::untrusted_text::assert_is_fit;
use crate::error::Result;
use crate::model::capacity::VolumeLimits;
use crate::model::ids::VolumeId;
use crate::model::records::Timestamp;

const LIMIT: Duration = Duration::from_secs(1);

/// One packet as the reply to each request: a pause is not longer than the driver's own wait, and
/// the daemon's text in an error is one short line.
pub fn control_reply(packet: &[u8]) {
    let volume_id = VolumeId::from_key("0123456789abcdef0123456789abcdef").expect("32 digits");
    let control = || {
        let (socket, daemon) = PacketSocket::pair().expect("a pair of sockets");
        daemon.send(packet, &[]).expect("a packet fits into the socket");
        // Dropped last, so that the driver can send its request.
        (Control { socket, volume_id: volume_id.clone(), limit: LIMIT }, daemon)
    };
    let asked = |ask: fn(&Control) -> Result<()>| {
        let (control, _daemon) = control();
        if let Err(error) = ask(&control) {
            assert_is_fit(&chain(&error));
        }
    };
    asked(Control::ping);
    asked(|control| control.usage().map(drop));
    asked(|control| control.set_capacity(VolumeLimits { bytes: 1 << 20, inodes: 0 }));
    asked(|control| {
        let files = control.written(7)?;
        assert!(files.iter().all(|file| file.node > 7) && files.is_sorted_by_key(|file| file.node));
        Ok(())
    });
    asked(|control| control.hold(LIMIT, PassingWrites::GoOn).map(drop));
    let (control, _daemon) = control();
    let since = Instant::now();
    let note = Arc::new(Hangs::default()).holding_back(&volume_id);
    let quiesced = Quiesced {
        control,
        passing: PassingWrites::GoOn,
        used_bytes: 0,
        used_inodes: 0,
        at: Timestamp::now(),
        since,
        granted: Granted { sent: since, lease: LIMIT },
        _noted: note,
    };
    match quiesced.resume() {
        Ok(paused) => assert!(paused.paused <= since.elapsed() + LIMIT),
        Err(error) => assert_is_fit(&chain(&error)),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn seeds_of_replies_to_requests_hold() {
        tests::seeds::run("control_reply", super::control_reply);
    }
}
