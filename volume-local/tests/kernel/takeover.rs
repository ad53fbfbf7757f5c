//! A daemon is killed, and another one continues its connection: applications see a pause, and no
//! error.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::fixture::{ROOT, Setup, Volume};

const KILLS: usize = 40;

const SETUP: Setup = Setup {
    capacity_bytes: 0,
    inode_limit: 0,
    read_only: false,
    confine: true,
    descriptors: 0,
    known_inodes: 0,
    successors: 1,
};

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
