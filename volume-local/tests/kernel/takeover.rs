//! A daemon is killed, and another one continues its connection: applications see a pause, and no
//! error.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::mount::MsFlags;

use crate::fixture::{ROOT, Setup, Stage, Volume};
use crate::known;

const KILLS: usize = 40;

pub(crate) const SETUP: Setup = Setup { confine: true, successors: 1, ..Setup::PLAIN };

#[test]
fn open_files_and_known_names_continue() {
    let mut volume = Volume::with(Setup { successors: 2, ..SETUP });
    fs::create_dir(volume.path("d")).unwrap();
    let mut file = File::create_new(volume.path("d/f")).unwrap();
    file.write_all(b"before").unwrap();
    let inode = file.metadata().unwrap().ino();
    volume.kill();
    volume.take_over(SETUP);
    file.write_all(b" and after").unwrap();
    assert_eq!(file.metadata().unwrap().ino(), inode);
    assert_eq!(fs::read(volume.path("d/f")).unwrap(), b"before and after");
    assert_eq!(fs::read(volume.backing.join("d/f")).unwrap(), b"before and after");
    fs::rename(volume.path("d"), volume.path("e")).unwrap();
    volume.kill();
    volume.take_over(SETUP);
    file.write_all(b" again").unwrap();
    assert_eq!(fs::read(volume.path("e/f")).unwrap(), b"before and after again");
    drop(file);
    let (status, said) = volume.unmount();
    assert_eq!((status.code(), said.as_str()), (Some(0), ""));
}

#[test]
fn requests_wait_while_there_is_no_daemon_and_are_answered_by_the_next() {
    let mut volume = Volume::with(SETUP);
    fs::write(volume.path("f"), "x").unwrap();
    volume.kill();
    let (path, begun) = (volume.path("f"), Instant::now());
    let waiting = std::thread::spawn(move || fs::metadata(path).map(|seen| (seen.len(), begun.elapsed())));
    // The request is on its way before the next daemon starts; nothing shows when it waits.
    while volume.waiting() == 0 {
        std::thread::yield_now();
    }
    volume.take_over(SETUP);
    assert_eq!(waiting.join().unwrap().unwrap().0, 1);
}

#[test]
fn a_listing_continues_without_a_loss_or_a_repetition() {
    let mut volume = Volume::with(Setup { successors: 5, ..SETUP });
    let names: std::collections::BTreeSet<String> =
        (0..3000).map(|number| format!("file-{number:04}")).collect();
    for name in &names {
        File::create(volume.backing.join(name)).unwrap();
    }
    let mut listed = Vec::new();
    for (number, entry) in fs::read_dir(&volume.path).unwrap().enumerate() {
        listed.push(entry.unwrap().file_name().into_string().unwrap());
        if number % 700 == 350 {
            volume.kill();
            volume.take_over(SETUP);
        }
    }
    assert_eq!(listed.len(), names.len());
    assert_eq!(listed.into_iter().collect::<std::collections::BTreeSet<_>>(), names);
}

#[test]
fn appended_mapped_and_sparse_data_is_whole() {
    let mut volume = Volume::with(Setup { successors: 5, ..SETUP });
    let mut log = OpenOptions::new().append(true).create(true).open(volume.path("log")).unwrap();
    let sparse = OpenOptions::new().read(true).write(true).create_new(true).open(volume.path("s")).unwrap();
    for round in 0..5_u64 {
        log.write_all(format!("line {round}\n").as_bytes()).unwrap();
        sparse.write_all_at(&round.to_le_bytes(), round << 20).unwrap();
        volume.kill();
        volume.take_over(SETUP);
    }
    let lines: String = (0..5).map(|round| format!("line {round}\n")).collect();
    assert_eq!(fs::read_to_string(volume.path("log")).unwrap(), lines);
    for round in 0..5_u64 {
        let mut bytes = [0; 8];
        sparse.read_exact_at(&mut bytes, round << 20).unwrap();
        assert_eq!(u64::from_le_bytes(bytes), round);
    }
}

/// Each operation that is not the same when it is made twice, in a loop, while the daemon is killed
/// again and again.
#[test]
fn names_change_exactly_once_while_daemons_are_killed() {
    let mut volume = Volume::with(Setup { successors: KILLS, ..SETUP });
    let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let workers: Vec<_> = (0..3)
        .map(|worker| {
            let (stop, rounds) = (Arc::clone(&stop), Arc::clone(&rounds));
            let dir = volume.path(&format!("w{worker}"));
            std::thread::spawn(move || {
                fs::create_dir(&dir).unwrap();
                while !stop.load(Ordering::Relaxed) {
                    let at = |name: &str| dir.join(name);
                    fs::create_dir(at("d")).expect("mkdir");
                    let mut file = File::create_new(at("d/f")).expect("create");
                    file.write_all(b"content").expect("write");
                    fs::rename(at("d/f"), at("g")).expect("rename");
                    fs::hard_link(at("g"), at("h")).expect("link");
                    std::os::unix::fs::symlink("g", at("l")).expect("symlink");
                    fs::remove_file(at("g")).expect("unlink");
                    assert_eq!(fs::read(at("h")).expect("read"), b"content");
                    fs::remove_file(at("h")).expect("unlink of the last name");
                    fs::remove_file(at("l")).expect("unlink of a link");
                    fs::remove_dir(at("d")).expect("rmdir");
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
                assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
            })
        })
        .collect();
    for kill in 0..KILLS {
        let before = rounds.load(Ordering::Relaxed);
        let begun = Instant::now();
        while rounds.load(Ordering::Relaxed) < before + 2 + kill as u64 % 3 {
            assert!(begun.elapsed() < Duration::from_secs(60), "no progress after kill {kill}");
            assert!(!workers.iter().any(std::thread::JoinHandle::is_finished), "a worker failed");
            std::thread::yield_now();
        }
        volume.kill();
        volume.take_over(SETUP);
    }
    stop.store(true, Ordering::Relaxed);
    for worker in workers {
        worker.join().unwrap();
    }
    // The killed daemons have counted lookups twice, and have read FORGETs that they did not carry out.
    volume.remount(MsFlags::empty()).unwrap();
    let control = volume.control();
    known::until("no inode is known but the root", || known::stats(&control).known_inodes == 1);
}

#[test]
fn the_limit_of_a_volume_holds_across_daemons() {
    let setup = Setup { capacity_bytes: 8 << 20, ..SETUP };
    let mut volume = Volume::with(setup);
    let mut file = File::create(volume.path("f")).unwrap();
    file.write_all(&vec![1; 3 << 20]).unwrap();
    volume.kill();
    volume.take_over(setup);
    let before = volume.usage().used_bytes;
    assert!((3 << 20..4 << 20).contains(&before), "{before}");
    let written = std::io::copy(&mut std::io::repeat(2).take(20 << 20), &mut file);
    assert_eq!(written.unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    let length = file.metadata().unwrap().len();
    assert!((7 << 20..=8 << 20).contains(&length), "{length}");
}

/// What a daemon cannot know without a count: a file that was made behind the mount.
const BEHIND: u64 = 5 << 20;

#[test]
fn a_successor_knows_the_use_of_many_files_without_a_count() {
    const FILES: u64 = 20_000;
    let setup = Setup { capacity_bytes: 1 << 30, inode_limit: 1_000_000, ..SETUP };
    let stage = Stage::new();
    (0..20).for_each(|directory| fs::create_dir(stage.backing.join(format!("d{directory}"))).unwrap());
    for file in 0..FILES {
        fs::write(stage.backing.join(format!("d{}/f{file}", file % 20)), "x").unwrap();
    }
    let mut volume = Volume::on(stage, Setup { successors: 2, ..setup });
    // Changed files have records of their own.
    for file in (0..FILES).step_by(10) {
        fs::write(volume.path(&format!("d{}/f{file}", file % 20)), "changed").unwrap();
    }
    let before = volume.usage();
    assert_eq!(before.used_inodes, FILES + 20 + 1);
    fs::write(volume.backing.join("behind"), vec![1; usize::try_from(BEHIND).unwrap()]).unwrap();
    for round in 0..2_u64 {
        volume.kill();
        volume.take_over(setup);
        let now = volume.usage_now();
        assert!(!now.counting, "changes would wait");
        assert_eq!((now.used_bytes, now.used_inodes), (before.used_bytes, before.used_inodes + round));
        fs::write(volume.path("d0/another"), "x").unwrap();
        fs::write(volume.path(&format!("d0/one-{round}")), "").unwrap();
        fs::remove_file(volume.path("d0/another")).unwrap();
        assert_use_settles_at(&volume, before.used_bytes, before.used_inodes + round + 1);
    }
    let seen = rustix::fs::statvfs(&volume.path).unwrap();
    assert_eq!((seen.f_blocks - seen.f_bfree) * seen.f_frsize, before.used_bytes);
    assert_eq!(seen.f_files - seen.f_ffree, before.used_inodes + 2);
    fs::remove_file(volume.backing.join("behind")).unwrap();
}

/// A removed file is charged until the kernel has forgotten it.
fn assert_use_settles_at(volume: &Volume, bytes: u64, inodes: u64) {
    let begun = Instant::now();
    loop {
        let usage = volume.usage();
        if (usage.used_bytes, usage.used_inodes) == (bytes, inodes) {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{usage:?}, not {bytes} and {inodes}");
        std::thread::yield_now();
    }
}

/// Where the version and the use of the volume are, and the records with one for each changed file
/// (volume-fs/src/state.rs, volume-local/src/state_table.rs).
const VERSION: usize = 1;
const USE: std::ops::Range<usize> = 512 + 8..512 + 14;
const RECORDS: usize = 512 + 41 * 512;
const CHUNK_WORDS: usize = 4;

/// As a daemon of version 1 leaves it: it writes no charges.
fn make_version_1(volume: &Volume) {
    const RELEASED: u64 = 1;
    let words = volume.state();
    words[VERSION].store(1, Ordering::Relaxed);
    words[USE].iter().for_each(|word| word.store(0, Ordering::Relaxed));
    let release = |head: &AtomicU64| {
        let kept = head.load(Ordering::Relaxed) & !0xff;
        head.store(kept | RELEASED, Ordering::Relaxed);
    };
    assert!(each_charge(volume, release) > 0, "the daemon before has written charges");
}

fn charges(volume: &Volume) -> usize {
    each_charge(volume, |_| {})
}

/// Looks at the first word of each record of a charge; how many there are.
fn each_charge(volume: &Volume, look: impl Fn(&AtomicU64)) -> usize {
    const RUN: u64 = 2;
    const CHARGE: u64 = 6;
    let words = volume.state();
    let (mut at, mut found) = (RECORDS, 0);
    loop {
        let head = words[at].load(Ordering::Relaxed);
        let chunks = match head & 0xff {
            0 => return found,
            RUN => words[at + 1].load(Ordering::Relaxed),
            _ => head >> 8 & 0xff,
        };
        if head & 0xff == CHARGE {
            look(&words[at]);
            found += 1;
        }
        at += CHUNK_WORDS * usize::try_from(chunks).unwrap();
    }
}

#[test]
fn a_table_of_the_version_before_is_continued_and_the_use_is_counted() {
    let setup = Setup { capacity_bytes: 64 << 20, ..SETUP };
    let mut volume = Volume::with(Setup { successors: 2, ..setup });
    let mut file = File::create(volume.path("f")).unwrap();
    file.write_all(&[1; 9000]).unwrap();
    let before = volume.usage().used_bytes;
    fs::write(volume.backing.join("behind"), vec![1; usize::try_from(BEHIND).unwrap()]).unwrap();
    volume.kill();
    make_version_1(&volume);
    volume.take_over(setup);
    file.write_all(&[1; 9000]).unwrap();
    let counted = before + BEHIND + 2 * 4096;
    assert_eq!(volume.usage().used_bytes, counted, "as the count finds it");
    // A daemon of the version before could continue again: it knows no charges.
    assert_eq!(volume.state()[VERSION].load(Ordering::Relaxed), 1);
    assert_eq!(charges(&volume), 0);
    volume.kill();
    volume.take_over(setup);
    assert_eq!(volume.usage().used_bytes, counted, "counted anew");
    assert_eq!(fs::read(volume.path("f")).unwrap(), [1; 18_000]);
}

#[test]
fn a_table_of_another_version_is_refused_and_stays_as_it_was() {
    let mut volume = Volume::with(Setup { successors: 3, ..SETUP });
    let mut file = File::create(volume.path("f")).unwrap();
    file.write_all(b"before").unwrap();
    volume.kill();
    let usage = fs::metadata(volume.usage_file()).unwrap();
    for version in [3, 0] {
        volume.state()[VERSION].store(version, Ordering::Relaxed);
        let refused = volume.try_to_take_over(SETUP).unwrap_err();
        let both = format!("the earlier daemon wrote version {version}, this one reads versions 1 to 2");
        assert!(refused.contains(&both), "{refused}");
    }
    assert_eq!(fs::metadata(volume.usage_file()).unwrap().mtime_nsec(), usage.mtime_nsec());
    volume.state()[VERSION].store(2, Ordering::Relaxed);
    volume.take_over(SETUP);
    file.write_all(b" and after").unwrap();
    assert_eq!(fs::read(volume.path("f")).unwrap(), b"before and after");
}

/// The kernel keeps to the first daemon's answer to FUSE_INIT, also if a later program would ask for more.
#[test]
fn a_daemon_that_would_ask_the_kernel_for_more_serves_without_it_and_names_it() {
    /// Where the first answer's flags are: the upper half of a word.
    const FLAGS: usize = 48 + 3;
    const DONT_MASK: u64 = 1 << (32 + 6);
    const CACHE_SYMLINKS: u64 = 1 << (32 + 23);
    let mut volume = Volume::with(Setup { successors: 3, ..SETUP });
    fs::write(volume.path("f"), "kept").unwrap();
    volume.kill();
    let flags = volume.state()[FLAGS].load(Ordering::Relaxed);
    assert_eq!(flags & (DONT_MASK | CACHE_SYMLINKS), DONT_MASK | CACHE_SYMLINKS);
    volume.state()[FLAGS].store(flags & !DONT_MASK, Ordering::Relaxed);
    let refused = volume.try_to_take_over(SETUP).unwrap_err();
    assert!(refused.contains("lacks FUSE_DONT_MASK, which this daemon needs"), "{refused}");
    // As if the first daemon had been of a program that does not know it.
    volume.state()[FLAGS].store(flags & !CACHE_SYMLINKS, Ordering::Relaxed);
    let ready = volume.try_to_take_over(SETUP).unwrap();
    assert_eq!(ready.needs_new_stage, ["FUSE_CACHE_SYMLINKS"]);
    assert_eq!(fs::read(volume.path("f")).unwrap(), b"kept");
}

#[test]
fn a_daemon_that_prepares_changes_nothing_until_the_earlier_one_has_ended() {
    let setup = Setup { capacity_bytes: 64 << 20, ..SETUP };
    // The daemon that serves may have something left to do for earlier requests in all attempts but one.
    const ATTEMPTS: usize = 3;
    let mut volume = Volume::with(Setup { successors: 2 * ATTEMPTS + 1, ..setup });
    let mut file = File::create(volume.path("f")).unwrap();
    file.write_all(b"before").unwrap();
    let words = |volume: &Volume| -> Vec<u64> {
        volume.state().iter().take(64 << 10).map(|word| word.load(Ordering::Relaxed)).collect()
    };
    let usage = |volume: &Volume| fs::metadata(volume.usage_file()).unwrap().mtime_nsec();
    let changes_nothing = |volume: &mut Volume| {
        // The daemon clears the record of a request after its answer.
        let state = loop {
            let seen = words(volume);
            std::thread::park_timeout(Duration::from_millis(50));
            if words(volume) == seen {
                break seen;
            }
        };
        let used = usage(volume);
        volume.state()[VERSION].store(3, Ordering::Relaxed);
        let refused = volume.prepare(setup).err().unwrap();
        assert!(refused.contains("wrote version 3, this one reads versions 1 to 2"), "{refused}");
        volume.state()[VERSION].store(2, Ordering::Relaxed);
        let unwanted = volume.prepare(setup).unwrap();
        if (words(volume), usage(volume)) == (state, used) {
            return Some(unwanted);
        }
        assert!(unwanted.hang_up().success());
        None
    };
    let unwanted = (0..ATTEMPTS).find_map(|_| changes_nothing(&mut volume)).expect("nothing is changed");
    file.write_all(b" and while one waits").unwrap();
    assert!(unwanted.hang_up().success());
    let next = volume.prepare(setup).unwrap();
    file.write_all(b" and then").unwrap();
    volume.kill();
    volume.proceed(next);
    file.write_all(b" after").unwrap();
    assert_eq!(fs::read(volume.path("f")).unwrap(), b"before and while one waits and then after");
}

#[test]
fn a_daemon_without_a_predecessor_refuses_to_continue() {
    let mut volume = Volume::with(SETUP);
    volume.kill();
    // As if the first daemon had been killed before it had answered FUSE_INIT.
    volume.forget_state();
    let refused = volume.try_to_take_over(SETUP).unwrap_err();
    assert!(refused.contains("the earlier daemon has not answered FUSE_INIT"), "{refused}");
    volume.abort();
}

#[test]
fn many_known_files_are_found_again() {
    let mut volume = Volume::with(SETUP);
    volume.shell(ROOT, "for d in 1 2 3 4 5; do mkdir d$d; for f in $(seq 200); do echo $f > d$d/a-rather-long-name-of-a-file-$f; done; done");
    let mut open: Vec<File> = (1..=200)
        .map(|f| File::open(volume.path(&format!("d3/a-rather-long-name-of-a-file-{f}"))).unwrap())
        .collect();
    volume.shell(ROOT, "mv d3 moved; mv moved/a-rather-long-name-of-a-file-7 d4/seven; rm -r d5");
    volume.kill();
    volume.take_over(SETUP);
    for (number, file) in (1..).zip(&mut open) {
        let mut text = String::new();
        file.seek(SeekFrom::Start(0)).unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, format!("{number}\n"));
    }
    assert_eq!(fs::read_to_string(volume.path("d4/seven")).unwrap(), "7\n");
    assert_eq!(
        volume.shell(ROOT, "ls moved | wc -l; ls d4 | wc -l; ls -d d5 2>/dev/null || echo none"),
        "199\n201\nnone"
    );
}

#[test]
fn files_without_a_name_stay_open_and_are_let_go_when_they_are_closed() {
    let mut volume = Volume::with(Setup { successors: 3, ..SETUP });
    let open = |name: &str| {
        OpenOptions::new().read(true).write(true).create_new(true).open(volume.path(name)).unwrap()
    };
    let (mut removed, mut replaced, linked) = (open("removed"), open("replaced"), open("linked"));
    removed.write_all(b"removed").unwrap();
    replaced.write_all(b"replaced").unwrap();
    linked.write_all_at(b"linked", 0).unwrap();
    fs::remove_file(volume.path("removed")).unwrap();
    open("other").write_all(b"other").unwrap();
    fs::rename(volume.path("other"), volume.path("replaced")).unwrap();
    fs::hard_link(volume.path("linked"), volume.path("second")).unwrap();
    fs::remove_file(volume.path("linked")).unwrap();
    fs::create_dir(volume.path("gone")).unwrap();
    let gone = File::open(volume.path("gone")).unwrap();
    fs::remove_dir(volume.path("gone")).unwrap();
    for round in 0..2 {
        volume.kill();
        volume.take_over(SETUP);
        for (file, text) in [(&mut removed, &b"removed"[..]), (&mut replaced, b"replaced")] {
            let mut read = Vec::new();
            file.rewind().unwrap();
            file.read_to_end(&mut read).unwrap();
            assert_eq!(&read[..text.len()], text, "round {round}");
            assert_eq!(file.metadata().unwrap().nlink(), 0);
            file.write_all(b" and more").unwrap();
        }
        let mut text = [0; 6];
        linked.read_exact_at(&mut text, 0).unwrap();
        assert_eq!((&text, linked.metadata().unwrap().nlink()), (b"linked", 1));
        assert_eq!(fs::read(volume.path("second")).unwrap(), b"linked");
        assert_eq!(fs::read(volume.path("replaced")).unwrap(), b"other");
        assert_eq!(gone.metadata().unwrap().nlink(), 0);
    }
    let kept = volume.kept_nodes();
    assert!((3..=4).contains(&kept.len()), "{kept:?}");
    drop((removed, replaced, linked, gone));
    let begun = Instant::now();
    while !volume.kept_nodes().is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", volume.kept_nodes());
        std::thread::yield_now();
    }
    let usage = volume.usage();
    volume.kill();
    volume.take_over(SETUP);
    assert_eq!(volume.usage().used_inodes, usage.used_inodes);
}

/// The kernel opens it without a request to the daemon.
#[test]
fn a_removed_fifo_that_is_open_stays_usable_after_a_takeover() {
    let mut volume = Volume::with(SETUP);
    volume.shell(ROOT, "mkfifo pipe");
    let mut pipe = OpenOptions::new().read(true).write(true).open(volume.path("pipe")).unwrap();
    fs::remove_file(volume.path("pipe")).unwrap();
    volume.kill();
    volume.take_over(SETUP);
    pipe.set_permissions(Permissions::from_mode(0o640)).unwrap();
    let seen = pipe.metadata().unwrap();
    assert_eq!((seen.mode() & 0o777, seen.nlink()), (0o640, 0));
    pipe.write_all(b"through").unwrap();
    let mut read = [0; 7];
    pipe.read_exact(&mut read).unwrap();
    assert_eq!(&read, b"through");
    drop(pipe);
    known::until("the keeper has released it", || volume.kept_nodes().is_empty());
}

/// Uses a file of one name in each way that asks the daemon, and puts it back.
fn use_file(path: &Path, content: &str) {
    assert_eq!(fs::metadata(path).unwrap().nlink(), 1, "{}", path.display());
    assert_eq!(fs::read_to_string(path).unwrap(), content);
    fs::write(path, content).unwrap();
    fs::set_permissions(path, Permissions::from_mode(0o640)).unwrap();
    let (moved, linked) = (path.with_extension("moved"), path.with_extension("linked"));
    fs::rename(path, &moved).unwrap();
    fs::hard_link(&moved, &linked).unwrap();
    fs::remove_file(&moved).unwrap();
    fs::rename(&linked, path).unwrap();
    assert_eq!(fs::metadata(path).unwrap().mode() & 0o777, 0o640);
}

/// As by `cp -al from to; rm -rf to`.
#[test]
fn files_whose_hard_links_are_removed_take_few_descriptors() {
    const LINKED: usize = 300;
    let setup = Setup { descriptors: 1024, ..SETUP };
    let mut volume = Volume::with(setup);
    let descriptors = |volume: &Volume| fs::read_dir(format!("/proc/{}/fd", volume.pid())).unwrap().count();
    let at = |volume: &Volume, number: usize, directory: &str| volume.path(&format!("{directory}/f{number}"));
    let before = descriptors(&volume);
    ["from", "to"].into_iter().for_each(|name| fs::create_dir(volume.path(name)).unwrap());
    for number in 0..LINKED {
        fs::write(at(&volume, number, "from"), number.to_string()).unwrap();
        fs::hard_link(at(&volume, number, "from"), at(&volume, number, "to")).unwrap();
    }
    // These are in use: by a name that is removed, and by one that stays, without an open file of FUSE.
    let mut open = File::open(at(&volume, 0, "to")).unwrap();
    let held = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(at(&volume, 1, "from")).unwrap();
    let by_held = PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd()));
    fs::remove_dir_all(volume.path("to")).unwrap();
    known::until("few descriptors are left", || {
        descriptors(&volume) <= before + LINKED / 10 && volume.kept_nodes().len() <= LINKED / 10
    });
    assert_eq!(fs::read_to_string(&by_held).unwrap(), "1");
    for number in 0..LINKED / 2 {
        use_file(&at(&volume, number, "from"), &number.to_string());
    }
    volume.kill();
    volume.take_over(setup);
    assert_eq!(fs::read_to_string(&by_held).unwrap(), "1");
    let mut text = String::new();
    open.read_to_string(&mut text).unwrap();
    assert_eq!(text, "0");
    for number in 0..LINKED {
        use_file(&at(&volume, number, "from"), &number.to_string());
    }
    drop((open, held));
    volume.shell(ROOT, "rm -r from");
    let control = volume.control();
    known::until("all is forgotten", || {
        known::stats(&control).known_inodes <= 2 && volume.kept_nodes().is_empty()
    });
}
