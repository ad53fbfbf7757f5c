//! Decides from consecutive deadlines when a daemon is hung.

/// A daemon is hung after this many consecutive deadlines without an answer and without a disk
/// wait.
const DEADLINES: u32 = 3;
/// For this many deadlines, a daemon may report that it counts its volume (after a kill) while
/// changes wait.
const MOST_COUNTING: u32 = 30;

/// What was observed in a deadline that passed without an answer while users waited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen {
    /// Nothing that explains the silence.
    Silence,
    /// Killed processes of pods that are being taken down waited throughout, whatever the daemon
    /// answered to the driver.
    KilledUsers,
    /// A thread of the daemon was waiting for the pool's disk.
    DiskWait,
    /// The driver itself holds the writers back.
    HeldBack,
    /// The daemon reports that it counts the volume.
    Counting,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Wait,
    /// Reported once: the disk has stalled for as long as would make the daemon hung.
    DiskStalls,
    Hung,
}

#[derive(Debug, Default)]
pub(crate) struct Tally {
    missed: u32,
    silent: u32,
    counting: u32,
    is_stall_reported: bool,
}

impl Tally {
    pub(crate) fn missed(&mut self, seen: Seen) -> Verdict {
        self.missed += 1;
        let seen = match seen {
            Seen::Counting if self.counting >= MOST_COUNTING => Seen::Silence,
            seen => seen,
        };
        match seen {
            Seen::Silence | Seen::KilledUsers => {
                self.silent += 1;
                if self.silent >= DEADLINES { Verdict::Hung } else { Verdict::Wait }
            }
            Seen::DiskWait => {
                self.silent = 0;
                let is_news = self.missed >= DEADLINES && !self.is_stall_reported;
                self.is_stall_reported |= is_news;
                if is_news { Verdict::DiskStalls } else { Verdict::Wait }
            }
            Seen::Counting => {
                (self.silent, self.counting) = (0, self.counting + 1);
                Verdict::Wait
            }
            Seen::HeldBack => {
                (self.silent, self.missed) = (0, 0);
                Verdict::Wait
            }
        }
    }

    pub(crate) fn is_stall_reported(&self) -> bool {
        self.is_stall_reported
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Seen::{Counting, DiskWait, HeldBack, KilledUsers, Silence};
    use Verdict::{DiskStalls, Hung, Wait};

    fn verdicts(seen: &[Seen]) -> Vec<Verdict> {
        let mut tally = Tally::default();
        seen.iter().map(|one| tally.missed(*one)).collect()
    }

    #[test]
    fn three_silent_deadlines_in_a_row_are_a_hang() {
        assert_eq!(verdicts(&[Silence; 3]), [Wait, Wait, Hung]);
        assert_eq!(verdicts(&[KilledUsers, Silence, KilledUsers]), [Wait, Wait, Hung]);
        assert_eq!(verdicts(&[KilledUsers, DiskWait, KilledUsers, KilledUsers]), [Wait; 4]);
        assert_eq!(
            verdicts(&[Silence, Silence, HeldBack, Silence, Silence, Silence]),
            [Wait, Wait, Wait, Wait, Wait, Hung]
        );
    }

    #[test]
    fn a_wait_for_the_disk_is_reported_once_and_never_a_hang() {
        assert_eq!(verdicts(&[DiskWait; 5]), [Wait, Wait, DiskStalls, Wait, Wait]);
        assert_eq!(
            verdicts(&[Silence, Silence, DiskWait, Silence, Silence, DiskWait]),
            [Wait, Wait, DiskStalls, Wait, Wait, Wait]
        );
        assert_eq!(
            verdicts(&[DiskWait, DiskWait, DiskWait, Silence, Silence, Silence]),
            [Wait, Wait, DiskStalls, Wait, Wait, Hung],
            "the disk is back and the daemon is not"
        );
    }

    #[test]
    fn a_count_is_waited_for_and_not_for_ever() {
        let seen = [Counting; 33];
        let given = verdicts(&seen);
        assert!(given[..32].iter().all(|verdict| *verdict == Wait));
        assert_eq!(given[32], Hung);
    }
}
