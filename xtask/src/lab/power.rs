//! Power cuts: a guest with a node on a disk of its own is ended at a random
//! moment and booted again, many times, on the same disk.
//!
//! Invariant: what a guest acknowledged is remembered here, not on its disk.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};

use super::guest::{Disk, Guest, Writes};
use super::{Laboratory, PATIENCE, Report, suite};
use crate::build;
use crate::conformance::foreign::debian_program;
use crate::progress::say;

const CUTS: usize = 20;
const DISK_BYTES: u64 = 4 << 30;
/// Of the time in which the node makes changes.
const LONGEST: Duration = Duration::from_secs(8);
/// Chooses the moments: the same number gives the same ones.
const SEED: &str = "HAWSER_LAB_SEED";
const ACKNOWLEDGED: &str = "lab: ack ";
const VERIFIED: &str = "lab: verified ";
const VIOLATED: &str = "lab: violated: ";

pub(super) fn run(laboratory: &Laboratory, report: &mut Report) -> Result<()> {
    let seed = match std::env::var(SEED) {
        Ok(said) => said.parse().with_context(|| format!("{SEED}={said}: not a number"))?,
        Err(_) => SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_secs()),
    };
    say(&format!("{CUTS} power cuts, {SEED}={seed}"));
    let disk = laboratory.dir.join("power.ext4");
    make_disk(&disk)?;
    let mut moments = Moments(seed);
    let mut words = String::new();
    let mut bring_up = LONGEST;
    for cut in 0..CUTS {
        let started = Instant::now();
        let mut boot = Boot::start(laboratory, &disk, &words)?;
        // Every third falls while the node starts on what the one before left.
        let early = cut > 0 && cut % 3 == 0;
        if early {
            boot.read_until(|line| line == "lab: ack boot")?;
        } else {
            bring_up = boot.read_until_verified()?;
        }
        let after = moments.below(if early { bring_up } else { LONGEST });
        boot.read_for(after)?;
        let state = if early { "while it starts" } else { "at work" };
        words.push_str(&boot.cut()?);
        say(&format!(
            "cut {} {state}, after {:.1} s; {} words acknowledged; {:.0} s",
            cut + 1,
            after.as_secs_f64(),
            words.lines().count(),
            started.elapsed().as_secs_f64()
        ));
        report.counts.passed += 1;
    }
    // What the last cut left.
    Boot::start(laboratory, &disk, &words)?.read_until_verified()?;
    fs::remove_file(&disk).with_context(|| disk.display().to_string())
}

fn make_disk(disk: &Path) -> Result<()> {
    let _of_an_earlier_run = fs::remove_file(disk);
    let file = fs::File::create(disk).with_context(|| disk.display().to_string())?;
    file.set_len(DISK_BYTES).with_context(|| disk.display().to_string())?;
    let mkfs = debian_program("mkfs.ext4", "e2fsprogs")?;
    build::run(Command::new(mkfs).args(["-q", "-F"]).arg(disk))
}

struct Boot {
    guest: Guest,
    words: String,
    began: Option<Instant>,
}

impl Boot {
    fn start(laboratory: &Laboratory, disk: &Path, known: &str) -> Result<Self> {
        let script = laboratory.dir.join("power-cut.sh");
        let text = format!(
            "mkdir -p /data\nmount -t ext4 /dev/vdc /data || echo '{VIOLATED}the disk is not mounted'\n\
             cat >/tmp/acknowledged <<'END'\n{known}END\n{}",
            suite::script(&[suite::tool("lab-guest", &["power-cut", "/tmp/acknowledged"])])
        );
        fs::write(&script, text).with_context(|| script.display().to_string())?;
        let mut disks = laboratory.disks(&script)?;
        disks.push(Disk { image: disk.to_path_buf(), writes: Writes::Kept });
        let console = laboratory.dir.join("power-cut.console");
        let guest = Guest::boot(&laboratory.kernel, &laboratory.initramfs, &disks, &console, PATIENCE)?;
        Ok(Self { guest, words: String::new(), began: None })
    }

    fn read_until(&mut self, is_it: impl Fn(&str) -> bool) -> Result<()> {
        while let Some(line) = self.guest.next_line()? {
            self.take(&line)?;
            if is_it(&line) {
                return Ok(());
            }
        }
        bail!("the guest ended by itself{}", self.guest.last_words())
    }

    /// How long the node took for it.
    fn read_until_verified(&mut self) -> Result<Duration> {
        self.read_until(|line| line.starts_with(VERIFIED))?;
        Ok(self.began.map_or(LONGEST, |began| began.elapsed()))
    }

    fn read_for(&mut self, duration: Duration) -> Result<()> {
        let moment = Instant::now() + duration;
        while let Some(line) = self.guest.next_line_before(moment) {
            self.take(&line)?;
        }
        Ok(())
    }

    /// The words of this boot.
    fn cut(self) -> Result<String> {
        let Self { guest, mut words, .. } = self;
        for line in guest.cut()? {
            take(&line, &mut words)?;
        }
        Ok(words)
    }

    fn take(&mut self, line: &str) -> Result<()> {
        if line == "lab: ack boot" {
            self.began = Some(Instant::now());
        }
        take(line, &mut self.words).inspect_err(|_| {
            while let Some(line) = self.guest.next_line_before(Instant::now() + Duration::from_secs(5)) {
                say(&line);
            }
        })
    }
}

fn take(line: &str, words: &mut String) -> Result<()> {
    if let Some(word) = line.strip_prefix(ACKNOWLEDGED) {
        words.push_str(word);
        words.push('\n');
    } else if !line.starts_with("lab: ") {
        say(line);
    }
    ensure!(!line.starts_with(VIOLATED), "{line}");
    Ok(())
}

/// splitmix64.
struct Moments(u64);

impl Moments {
    fn below(&mut self, longest: Duration) -> Duration {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        longest.mul_f64(f64::from(((mixed ^ (mixed >> 31)) >> 32) as u32) / f64::from(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_moments() {
        let longest = Duration::from_secs(8);
        let moments = |seed| -> Vec<Duration> {
            let mut moments = Moments(seed);
            (0..5).map(|_| moments.below(longest)).collect()
        };
        assert_eq!(moments(7), moments(7));
        assert_ne!(moments(7), moments(8));
        assert!(moments(7).iter().all(|moment| *moment <= longest));
    }
}
