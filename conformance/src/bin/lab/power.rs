//! Power cuts: a guest with a node on a disk of its own is ended at a random
//! moment and booted again, many times, on the same disk.
//!
//! Invariant: what a guest acknowledged is remembered here, not on its disk.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use xtask::build;
use xtask::foreign::debian_program;
use xtask::progress::say;

use super::guest::{Crashed, Disk, Guest, Writes};
use super::{Laboratory, Report, TIMEOUT, suite};

const CUTS: usize = 20;
const DISK_BYTES: u64 = 4 << 30;
/// Of the time in which the node makes changes.
const LONGEST: Duration = Duration::from_secs(8);
/// Chooses the moments: the same number gives the same ones.
const SEED: &str = "HAWSER_LAB_SEED";
/// An emulator's fault is a cut at a moment that was not chosen. More of them are looked into.
const MOST_CRASHES: usize = 3;
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
    let mut node = Node { laboratory, disk: &disk, words: String::new(), bring_up: LONGEST };
    let (mut moments, mut crashes) = (Moments(seed), 0);
    for cut in 1..=CUTS {
        let fraction = moments.next();
        while let Err(error) = node.cut(cut, fraction) {
            match error.downcast_ref::<Crashed>() {
                Some(crashed) if crashes < MOST_CRASHES => say(&format!("cut {cut} once more: {crashed}")),
                _ => return Err(error),
            }
            crashes += 1;
        }
        report.counts.passed += 1;
    }
    // What the last cut left.
    node.boot()?.read_until_verified()?;
    fs::remove_file(&disk).with_context(|| disk.display().to_string())
}

fn make_disk(disk: &Path) -> Result<()> {
    let _of_an_earlier_run = fs::remove_file(disk);
    let file = fs::File::create(disk).with_context(|| disk.display().to_string())?;
    file.set_len(DISK_BYTES).with_context(|| disk.display().to_string())?;
    let mkfs = debian_program("mkfs.ext4", "e2fsprogs")?;
    build::run(Command::new(mkfs).args(["-q", "-F"]).arg(disk))
}

/// What one guest after the other runs on the same disk.
struct Node<'a> {
    laboratory: &'a Laboratory,
    disk: &'a Path,
    /// What it has acknowledged.
    words: String,
    /// How long it took to start.
    bring_up: Duration,
}

impl Node<'_> {
    /// `fraction`, from 0 to 1, is that of the time in which cut number `cut` may fall.
    fn cut(&mut self, cut: usize, fraction: f64) -> Result<()> {
        let started = Instant::now();
        // Every third falls while the node starts on what the one before left.
        let early = cut > 1 && cut % 3 == 1;
        let within = if early { self.bring_up } else { LONGEST };
        let mut boot = self.boot()?;
        let mut bring_up = within;
        if early {
            boot.read_until(|line| line == "lab: ack boot")?;
        } else {
            bring_up = boot.read_until_verified()?;
        }
        let after = within.mul_f64(fraction);
        boot.read_for(after)?;
        boot.cut()?;
        if !early {
            self.bring_up = bring_up;
        }
        say(&format!(
            "cut {cut} {}, after {:.1} s; {} words acknowledged; {:.0} s",
            if early { "while it starts" } else { "at work" },
            after.as_secs_f64(),
            self.words.lines().count(),
            started.elapsed().as_secs_f64()
        ));
        Ok(())
    }

    fn boot(&mut self) -> Result<Boot<'_>> {
        let script = self.laboratory.dir.join("power-cut.sh");
        let text = format!(
            "mkdir -p /data\nmount -t ext4 /dev/vdc /data || echo '{VIOLATED}the disk is not mounted'\n\
             cat >/tmp/acknowledged <<'END'\n{}END\n{}",
            self.words,
            suite::script(&[suite::tool("lab-guest", &["power-cut", "/tmp/acknowledged"])])
        );
        fs::write(&script, text).with_context(|| script.display().to_string())?;
        let mut disks = self.laboratory.disks(&script)?;
        disks.push(Disk { image: self.disk.to_path_buf(), writes: Writes::Kept });
        let console = self.laboratory.dir.join("power-cut.console");
        let (kernel, initramfs) = (&self.laboratory.kernel, &self.laboratory.initramfs);
        let guest = Guest::boot(kernel, initramfs, &disks, &console, TIMEOUT)?;
        Ok(Boot { guest, words: &mut self.words, began: None })
    }
}

struct Boot<'a> {
    guest: Guest,
    words: &'a mut String,
    began: Option<Instant>,
}

impl Boot<'_> {
    fn read_until(&mut self, is_it: impl Fn(&str) -> bool) -> Result<()> {
        while let Some(line) = self.guest.next_line()? {
            self.take(&line)?;
            if is_it(&line) {
                return Ok(());
            }
        }
        Err(self.guest.why_it_ended()?)
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

    fn cut(self) -> Result<()> {
        let Self { guest, words, .. } = self;
        guest.cut()?.iter().try_for_each(|line| take(line, words))
    }

    fn take(&mut self, line: &str) -> Result<()> {
        if line == "lab: ack boot" {
            self.began = Some(Instant::now());
        }
        take(line, self.words).inspect_err(|_| {
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
    /// From 0 to 1.
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        f64::from(((mixed ^ (mixed >> 31)) >> 32) as u32) / f64::from(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_moments() {
        let moments = |seed| -> Vec<f64> {
            let mut moments = Moments(seed);
            (0..5).map(|_| moments.next()).collect()
        };
        assert_eq!(moments(7), moments(7));
        assert_ne!(moments(7), moments(8));
        assert!(moments(7).iter().all(|moment| (0.0..=1.0).contains(moment)));
    }
}
