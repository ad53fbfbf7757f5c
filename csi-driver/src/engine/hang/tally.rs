//! When a daemon that does not answer is hung: a decision over one deadline after another.

/// That many deadlines in a row without an answer and without a wait for the disk.
const DEADLINES: u32 = 3;
/// Deadlines for which a daemon's word is taken that it counts its volume (after a kill)
/// while changes wait.
const MOST_COUNTING: u32 = 30;

/// What was seen in one deadline that passed without an answer, while users were waiting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen {
    /// Nothing that explains it.
    Silence,
    /// Killed processes of pods that are taken down waited all the time, whatever the daemon
    /// answered to the driver.
    KilledUsers,
    /// A thread of the daemon was waiting for the pool's disk.
    DiskWait,
    /// The driver itself holds the writers back.
    HeldBack,
    /// The daemon says that it counts the volume.
    Counting,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Wait,
    /// Said once: its disk has stalled for as long as would make it hung.
    DiskStalls,
    Hung,
}

#[derive(Debug, Default)]
pub(crate) struct Tally {
    missed: u32,
    silent: u32,
    counting: u32,
    is_stall_told: bool,
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
                let is_news = self.missed >= DEADLINES && !self.is_stall_told;
                self.is_stall_told |= is_news;
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

    pub(crate) fn is_stall_told(&self) -> bool {
        self.is_stall_told
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
    fn a_wait_for_the_disk_is_told_once_and_never_a_hang() {
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
