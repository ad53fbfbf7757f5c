//! Files that the kernel reads and writes without the daemon.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use proto::control::{Quiesce, Quiesced, Refused, reply, request};

use crate::files::store_by_mapping;
use crate::fixture::{BOB, ROOT, Setup, Stage, Volume, here, with_prompt_keeper};
use crate::known::until;
use crate::metrics::requests;
use crate::pauses::resume;
use crate::takeover;

const SETUP: Setup = Setup { passthrough: true, ..takeover::SETUP };

const LONG_LEASE: u32 = 30_000;
/// For something that must not happen.
const A_WHILE: Duration = Duration::from_millis(200);

pub(crate) fn read_write() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true);
    options
}

#[test]
fn the_daemon_sees_neither_reads_nor_writes() {
    with_prompt_keeper(Stage::new, SETUP, |volume| {
        let data: Vec<u8> = (0..1 << 20).map(|at: u32| at.to_le_bytes()[1]).collect();
        fs::write(volume.path("f"), &data).unwrap();
        let file = read_write().open(volume.path("f")).unwrap();
        assert_eq!(volume.registered().len(), 1);
        file.write_all_at(b"in place", 4096).unwrap();
        // The first write asks for security.capability, and no later one does.
        let asked = requests(volume, "getxattr");
        let mut appended = OpenOptions::new().append(true).open(volume.path("f")).unwrap();
        appended.write_all(b"at the end").unwrap();
        file.sync_all().unwrap();
        let mut expected = data;
        expected[4096..4104].copy_from_slice(b"in place");
        expected.extend(b"at the end");
        assert!(fs::read(volume.path("f")).unwrap() == expected);
        assert!(fs::read(volume.backing.join("f")).unwrap() == expected);
        assert_eq!(file.metadata().unwrap().len(), expected.len() as u64);
        assert_eq!([requests(volume, "read"), requests(volume, "write")], [0, 0]);
        assert_eq!(requests(volume, "getxattr"), asked);
        drop((file, appended));
        fs::remove_file(volume.path("f")).unwrap();
        volume.wait_for_registered(0);
        let (status, said) = volume.unmount();
        assert_eq!((status.code(), said.as_str()), (Some(0), ""));
    });
}

/// Although the writing application is root here, and the keeper is.
#[test]
fn what_passes_through_takes_no_blocks_that_are_reserved_for_root() {
    let stage = || Stage::on_file_system("ext4");
    with_prompt_keeper(stage, SETUP, |volume| {
        let mut file = read_write().open(volume.path("f")).unwrap();
        let block = vec![7; 1 << 20];
        let full = loop {
            if let Err(error) = file.write_all(&block) {
                break error;
            }
        };
        assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
        assert_eq!(requests(volume, "write"), 0);
        let left = rustix::fs::statvfs(&volume.backing).unwrap();
        assert!(left.f_bfree > left.f_bavail + 1000, "{} and {}", left.f_bfree, left.f_bavail);
        fs::write(volume.backing.join("native"), &block).unwrap();
    });
}

/// Opens and closes in every order; `change` is called between any two.
fn open_and_close_in_every_order(volume: &mut Volume, mut change: impl FnMut(&mut Volume, usize)) {
    fs::write(volume.path("f"), vec![0; 64 << 10]).unwrap();
    let mut random = tests::random::Random::new(tests::random::Random::seed("HAWSER_TEST_SEED"));
    let mut open: Vec<File> = Vec::new();
    for step in 0..200 {
        change(volume, step);
        let writes = random.below(2) == 1;
        if open.len() < 10 && random.below(2) == 1 {
            let file = OpenOptions::new().read(true).write(writes).open(volume.path("f"));
            open.push(file.unwrap_or_else(|e| panic!("step {step}: open: {e}")));
        } else if !open.is_empty() {
            drop(open.swap_remove(random.index(open.len())));
        }
        let number = (step as u64).to_le_bytes();
        for file in &open {
            let mut seen = [0; 8];
            file.read_exact_at(&mut seen, 8192).unwrap_or_else(|e| panic!("step {step}: read: {e}"));
            match file.write_all_at(&number, 8192) {
                Ok(()) => file.read_exact_at(&mut seen, 8192).unwrap(),
                Err(e) => {
                    assert_eq!(e.raw_os_error(), Some(libc::EBADF), "step {step}: {e}");
                    continue;
                }
            }
            assert_eq!(seen, number, "step {step}");
        }
    }
    drop(open);
    fs::remove_file(volume.path("f")).unwrap();
    volume.wait_for_registered(0);
}

#[test]
fn readers_and_writers_open_and_close_a_file_in_every_order() {
    with_prompt_keeper(Stage::new, SETUP, |volume| open_and_close_in_every_order(volume, |_, _| {}));
}

#[test]
fn they_do_while_daemons_are_killed() {
    let change = |volume: &mut Volume, step| {
        if step % 10 == 5 {
            volume.kill();
            volume.take_over(SETUP);
        }
    };
    let setup = Setup { successors: 20, ..SETUP };
    with_prompt_keeper(Stage::new, setup, |volume| open_and_close_in_every_order(volume, change));
}

/// A file that the daemon has begun to read and write stays with it until the last close.
#[test]
fn they_do_while_the_keeper_refuses_and_is_replaced() {
    let change = |volume: &mut Volume, step| match step % 40 {
        10 => volume.let_keeper_refuse(true),
        // After a refusal the daemon asks again only after a second.
        20 if step < 100 => std::thread::park_timeout(Duration::from_millis(1100)),
        25 => volume.let_keeper_refuse(false),
        30 => volume.replace_keeper(),
        35 => {
            volume.kill();
            volume.take_over(SETUP);
        }
        _ => {}
    };
    let setup = Setup { successors: 10, ..SETUP };
    with_prompt_keeper(Stage::new, setup, |volume| open_and_close_in_every_order(volume, change));
}

/// It stays in the state table until the keeper has certainly ended it.
#[test]
fn a_registration_that_was_to_end_is_given_to_no_later_open() {
    let mut volume = Volume::with(Setup { successors: 2, ..SETUP });
    fs::write(volume.path("f"), "kept").unwrap();
    until("the file is closed", || requests(&volume, "release") == 1);
    volume.kill();
    // This daemon ends the registration, since no handle needs it.
    volume.let_keeper_refuse(true);
    volume.take_over(SETUP);
    let mut by_daemon = File::open(volume.path("f")).unwrap();
    by_daemon.read_to_end(&mut Vec::new()).unwrap();
    assert_eq!(requests(&volume, "read"), 1);
    volume.kill();
    volume.let_keeper_refuse(false);
    volume.take_over(SETUP);
    assert_eq!(fs::read(volume.path("f")).unwrap(), b"kept");
    drop(by_daemon);
}

/// Two daemons are killed: the first before it reads the answer to a registration, the second right after
/// its own first one.
#[test]
fn a_registration_whose_answer_was_lost_is_ended_by_a_later_successor() {
    let setup = Setup { successors: 2, ..SETUP };
    with_prompt_keeper(Stage::new, setup, |volume| {
        for name in ["f", "g", "h"] {
            fs::write(volume.path(name), "x").unwrap();
        }
        volume.register_unseen("f");
        volume.kill();
        volume.take_over(SETUP);
        fs::write(volume.path("new"), "y").unwrap();
        volume.kill();
        volume.take_over(SETUP);
        for name in ["f", "g", "h", "new"] {
            fs::remove_file(volume.path(name)).unwrap();
        }
        volume.wait_for_registered(0);
    });
}

#[test]
fn open_files_pass_while_there_is_no_daemon_and_after_it() {
    let setup = Setup { successors: 2, ..SETUP };
    with_prompt_keeper(Stage::new, setup, |volume| {
        let file = read_write().open(volume.path("f")).unwrap();
        let gone = read_write().open(volume.path("gone")).unwrap();
        gone.write_all_at(b"no name", 0).unwrap();
        fs::remove_file(volume.path("gone")).unwrap();
        file.write_all_at(b"first", 0).unwrap();
        // Otherwise the next read would wait for a daemon.
        assert_eq!(requests(volume, "write"), 0, "both pass through");
        let before = volume.registered();
        volume.kill();
        // No request is needed for data.
        let mut seen = [0; 5];
        file.read_exact_at(&mut seen, 0).unwrap();
        file.write_all_at(b"again", 0).unwrap();
        volume.take_over(SETUP);
        file.write_all_at(b"third", 0).unwrap();
        assert_eq!(fs::read(volume.path("f")).unwrap(), b"third");
        let mut text = [0; 7];
        gone.read_exact_at(&mut text, 0).unwrap();
        assert_eq!(&text, b"no name");
        assert_eq!(gone.metadata().unwrap().nlink(), 0);
        // The second open of a file that is open has the same backing file.
        assert_eq!(volume.registered(), before);
        drop((file, gone));
        // The one with a name stays registered, and its next open takes the same number.
        volume.wait_for_registered(1);
        let stays = volume.registered();
        let file = read_write().open(volume.path("f")).unwrap();
        assert_eq!(volume.registered(), stays);
        volume.kill();
        // close(2) may wait for a daemon.
        let closing = std::thread::spawn(move || drop(file));
        volume.take_over(SETUP);
        closing.join().unwrap();
        assert_eq!(volume.registered(), stays);
        fs::remove_file(volume.path("f")).unwrap();
        volume.wait_for_registered(0);
        assert_eq!([requests(volume, "read"), requests(volume, "write")], [0, 0]);
    });
}

/// Between a registration and its note in the state table, and between any other two steps.
#[test]
fn nothing_stays_registered_that_is_not_open_while_daemons_are_killed() {
    const KILLS: usize = 30;
    let mut volume = Volume::with(Setup { successors: KILLS, ..SETUP });
    for number in 0..8 {
        fs::write(volume.path(&format!("f{number}")), "x").unwrap();
    }
    let stop = Arc::new(AtomicBool::new(false));
    let workers: Vec<_> = (0..3)
        .map(|worker| {
            let (stop, at) = (Arc::clone(&stop), volume.path(""));
            std::thread::spawn(move || {
                let mut rounds = 0;
                while !stop.load(Ordering::Relaxed) {
                    for number in [worker, worker + 1, worker + 2] {
                        let path = at.join(format!("f{number}"));
                        let file = OpenOptions::new().read(true).write(true).open(path).expect("open");
                        let mut byte = [0];
                        file.read_exact_at(&mut byte, 0).expect("read");
                        file.write_all_at(&byte, 0).expect("write");
                    }
                    let new = at.join(format!("new-{worker}"));
                    fs::write(&new, "y").expect("create");
                    fs::remove_file(&new).expect("unlink");
                    rounds += 1;
                }
                rounds
            })
        })
        .collect();
    for kill in 0..KILLS {
        std::thread::park_timeout(Duration::from_millis(17 + kill as u64 % 7));
        volume.kill();
        volume.take_over(SETUP);
    }
    stop.store(true, Ordering::Relaxed);
    let rounds: Vec<u64> = workers.into_iter().map(|worker| worker.join().unwrap()).collect();
    assert!(rounds.iter().all(|rounds| *rounds > 0), "{rounds:?}");
    // The next registration ends what a killed daemon has got and not written down. There is none for a
    // second after the keeper did not answer in time.
    for number in 0..8 {
        fs::remove_file(volume.path(&format!("f{number}"))).unwrap();
    }
    let begun = Instant::now();
    while !volume.registered().is_empty() {
        assert!(begun.elapsed() < here(Duration::from_secs(30)), "{:?}", volume.registered());
        fs::write(volume.path("probe"), "z").unwrap();
        fs::remove_file(volume.path("probe")).unwrap();
        std::thread::park_timeout(Duration::from_millis(50));
    }
}

#[test]
fn closed_files_stay_registered_up_to_a_bound() {
    const FILES: usize = 6000;
    with_prompt_keeper(Stage::new, SETUP, |volume| {
        for number in 0..FILES {
            fs::write(volume.path(&format!("f{number}")), "x").unwrap();
            if number % 50 == 0 {
                assert!(volume.registered().len() <= 4200, "{} after {number}", volume.registered().len());
            }
        }
        let before = volume.registered();
        assert!(before.len() >= 4000, "{}", before.len());
        for number in FILES - 100..FILES {
            assert_eq!(fs::read(volume.path(&format!("f{number}"))).unwrap(), b"x");
        }
        // None of them was registered anew.
        assert_eq!(volume.registered().last(), before.last());
        for number in 0..FILES {
            fs::remove_file(volume.path(&format!("f{number}"))).unwrap();
        }
        volume.wait_for_registered(0);
    });
}

/// The kernel keeps its pages, and asks nothing more than an open and a close.
#[test]
fn a_small_file_is_read_by_the_daemon_and_its_pages_stay() {
    let setup = Setup { successors: 2, ..SETUP };
    with_prompt_keeper(Stage::new, setup, |volume| {
        let path = volume.path("f");
        let read = |volume: &Volume| {
            // Until its close has arrived, a later open takes the same way as an earlier one.
            until("the file is closed", || {
                requests(volume, "open") + requests(volume, "create") == requests(volume, "release")
            });
            (fs::read(&path).unwrap(), requests(volume, "read"))
        };
        fs::write(&path, "first").unwrap();
        for _ in 0..3 {
            assert_eq!(read(volume), (b"first".to_vec(), 1));
        }
        fs::write(&path, "and second").unwrap();
        for _ in 0..3 {
            assert_eq!(read(volume), (b"and second".to_vec(), 2));
        }
        // Who opens it meanwhile takes the same way, also to write.
        let reader = File::open(&path).unwrap();
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b" and third").unwrap();
        assert_eq!(requests(volume, "write"), 1);
        let mut text = [0; 20];
        reader.read_exact_at(&mut text, 0).unwrap();
        assert_eq!(&text, b"and second and third");
        drop(reader);
        // A successor does not know what was mapped, and reads no more itself.
        volume.kill();
        volume.take_over(SETUP);
        assert_eq!(fs::read(&path).unwrap(), b"and second and third");
        assert_eq!(requests(volume, "read"), 0);
        fs::remove_file(&path).unwrap();
        volume.wait_for_registered(0);
    });
}

#[test]
fn a_large_file_passes_through_when_it_is_only_read() {
    with_prompt_keeper(Stage::new, SETUP, |volume| {
        fs::write(volume.path("f"), vec![1; 65 << 10]).unwrap();
        assert_eq!(fs::read(volume.path("f")).unwrap().len(), 65 << 10);
        assert_eq!(requests(volume, "read"), 0);
        fs::remove_file(volume.path("f")).unwrap();
        volume.wait_for_registered(0);
    });
}

/// A mapping stores to the pages of the backing file, also when its file is closed.
#[test]
#[expect(unsafe_code, reason = "there is no safe mmap")]
fn a_reader_sees_what_is_stored_by_a_mapping_of_a_small_file() {
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    let volume = Volume::with(SETUP);
    let path = volume.path("f");
    fs::write(&path, [b'-'; 4096]).unwrap();
    assert_eq!(fs::read(&path).unwrap()[0], b'-');
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    // SAFETY: the mapping is new, and is used only between here and munmap; the file is not shortened.
    let mapped = unsafe {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        mmap(std::ptr::null_mut(), 4096, protection, MapFlags::SHARED, &file, 0).unwrap()
    };
    drop(file);
    let reader = File::open(&path).unwrap();
    for number in 0..100 {
        // SAFETY: as above.
        unsafe { mapped.cast::<u8>().add(7).write_volatile(number) };
        let mut seen = [0];
        reader.read_exact_at(&mut seen, 7).unwrap();
        assert_eq!(seen, [number]);
        assert_eq!(fs::read(&path).unwrap()[7], number);
    }
    // SAFETY: as above.
    unsafe { munmap(mapped, 4096).unwrap() };
}

/// Files with every size around the limit, opened in every way, by one process after the other and at once.
#[test]
fn small_files_agree_with_a_model_while_daemons_are_killed() {
    const STEPS: usize = 1500;
    let setup = Setup { successors: 5, ..SETUP };
    with_prompt_keeper(Stage::new, setup, |volume| {
        let mut random = tests::random::Random::new(tests::random::Random::seed("HAWSER_TEST_SEED"));
        let mut model: Vec<Vec<u8>> = vec![Vec::new(); 4];
        let mut open: Vec<(usize, File)> = Vec::new();
        for number in 0..model.len() {
            fs::write(volume.path(&format!("f{number}")), "").unwrap();
        }
        for step in 0..STEPS {
            let (at, byte) = (random.index(model.len()), step.to_le_bytes()[0]);
            let path = volume.path(&format!("f{at}"));
            match random.below(8) {
                0 | 1 => {
                    let text = vec![byte; 1 + random.index(70 << 10)];
                    fs::write(&path, &text).unwrap();
                    model[at] = text;
                }
                2 => {
                    let mut file = OpenOptions::new().append(true).open(&path).unwrap();
                    file.write_all(&[byte; 100]).unwrap();
                    model[at].extend([byte; 100]);
                }
                3 if !model[at].is_empty() => {
                    let file = OpenOptions::new().read(true).write(random.below(9) == 0).open(&path).unwrap();
                    if open.len() == 6 {
                        drop(open.swap_remove(random.index(6)));
                    }
                    open.push((at, file));
                }
                4 if !open.is_empty() => drop(open.swap_remove(random.index(open.len()))),
                5 if step % 300 == 7 => {
                    volume.kill();
                    volume.take_over(SETUP);
                }
                _ => assert!(fs::read(&path).unwrap() == model[at], "step {step}: f{at}"),
            }
            for (at, file) in &open {
                let mut seen = vec![0; model[*at].len()];
                file.read_exact_at(&mut seen, 0).unwrap_or_else(|e| panic!("step {step}: f{at}: {e}"));
                assert!(seen == model[*at], "step {step}: the open f{at}");
            }
        }
        drop(open);
        for number in 0..model.len() {
            fs::remove_file(volume.path(&format!("f{number}"))).unwrap();
        }
        volume.wait_for_registered(0);
    });
}

#[test]
fn what_ends_without_a_keeper_is_ended_by_the_next_one_or_by_a_successor() {
    with_prompt_keeper(Stage::new, SETUP, |volume| {
        for name in ["f", "g"] {
            fs::write(volume.path(name), "x").unwrap();
        }
        volume.wait_for_registered(2);
        volume.end_keeper();
        fs::remove_file(volume.path("f")).unwrap();
        assert_eq!(volume.registered().len(), 2);
        volume.replace_keeper();
        volume.wait_for_registered(1);
        volume.end_keeper();
        fs::remove_file(volume.path("g")).unwrap();
        volume.kill();
        volume.take_over(SETUP);
        volume.wait_for_registered(0);
    });
}

#[test]
fn without_room_at_the_keeper_the_daemon_reads_and_writes() {
    let volume = Volume::with(SETUP);
    volume.let_keeper_refuse(true);
    fs::write(volume.path("f"), "by the daemon").unwrap();
    assert_eq!(fs::read_to_string(volume.path("f")).unwrap(), "by the daemon");
    assert!(requests(&volume, "write") > 0);
    assert!(volume.registered().is_empty());
}

/// The writes of a user who does not own the file, and those of root: as the kernel's own file systems
/// do, but for root, whose writes clear the bits too.
#[test]
fn a_write_clears_set_id_bits() {
    let volume = Volume::with(SETUP);
    volume.shell(ROOT, "touch f && chmod 6777 f");
    volume.shell(BOB, "echo x >> f");
    let mode = fs::metadata(volume.path("f")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o777, "{mode:o}");
}

#[test]
fn only_who_may_open_a_file_reads_and_writes_it() {
    let volume = Volume::with(SETUP);
    volume.shell(ROOT, "echo secret > f && chmod 600 f");
    assert!(!volume.try_shell(BOB, "cat f").status.success());
    assert!(!volume.try_shell(BOB, "echo x >> f").status.success());
    volume.shell(ROOT, "chmod 644 f");
    assert_eq!(volume.shell(BOB, "cat f"), "secret");
    // An open for reading alone cannot write, though the backing file is open for both.
    let file = File::open(volume.path("f")).unwrap();
    assert_eq!((&file).write(b"x").unwrap_err().raw_os_error(), Some(libc::EBADF));
}

/// No request tells the kernel's FUSE inode of the new times: it asks again within two seconds.
#[test]
fn mapped_stores_reach_the_file_at_once_and_its_times_soon() {
    with_prompt_keeper(Stage::new, SETUP, |volume| {
        let (path, backing) = (volume.path("f"), volume.backing.join("f"));
        fs::write(&path, vec![0; 8192]).unwrap();
        fs::metadata(&path).unwrap();
        std::thread::park_timeout(Duration::from_millis(20));
        store_by_mapping(&path, 5000);
        assert_eq!(fs::read(&backing).unwrap()[4999..5002], *b"\0M\0");
        let begun = Instant::now();
        let modified = |path: &Path| fs::metadata(path).unwrap().modified().unwrap();
        while modified(&path) != modified(&backing) {
            assert!(begun.elapsed() < here(Duration::from_secs(30)), "{:?}", modified(&path));
            std::thread::park_timeout(Duration::from_millis(10));
        }
    });
}

#[test]
fn direct_io_reaches_the_backing_file() {
    with_prompt_keeper(Stage::new, SETUP, |volume| {
        fs::write(volume.path("f"), vec![7; 64 << 10]).unwrap();
        let mut file =
            OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(volume.path("f")).unwrap();
        // An unaligned buffer or length is refused by the disk's file system, not copied by the daemon.
        let mut odd = [0; 100];
        assert_eq!(file.read(&mut odd[1..]).map_err(|e| e.raw_os_error()), Err(Some(libc::EINVAL)));
    });
}

/// A mapping outlives the descriptor, and the kernel does not tell its end.
#[test]
fn a_pause_is_refused_once_a_file_was_opened_for_writing() {
    let setup = Setup { successors: 2, ..SETUP };
    with_prompt_keeper(Stage::new, setup, |volume| {
        fs::write(volume.backing.join("f"), "before").unwrap();
        let control = volume.control();
        let quiet = || request::Kind::Quiesce(Quiesce { lease_ms: LONG_LEASE, passing_may_write: false });
        assert!(matches!(control.ask(quiet()), reply::Kind::Quiesced(Quiesced { .. })));
        // A reader is let in, a writer waits.
        assert_eq!(fs::read(volume.path("f")).unwrap(), b"before");
        let path = volume.path("f");
        let writer = std::thread::spawn(move || -> io::Result<()> {
            OpenOptions::new().write(true).open(path)?.write_all(b"later!")
        });
        std::thread::park_timeout(A_WHILE);
        assert!(!writer.is_finished());
        assert_eq!(fs::read(volume.backing.join("f")).unwrap(), b"before");
        resume(&control);
        writer.join().unwrap().unwrap();
        assert_eq!(fs::read(volume.backing.join("f")).unwrap(), b"later!");
        let reply::Kind::Refused(Refused { reason, is_precondition }) = control.ask(quiet()) else {
            panic!("not refused");
        };
        assert!(is_precondition && reason.contains("dataPath: daemon"), "{reason}");
        // Nothing is held back by the pause that was refused.
        let file = read_write().open(volume.path("g")).unwrap();
        let asked = request::Kind::Quiesce(Quiesce { lease_ms: LONG_LEASE, passing_may_write: true });
        assert!(matches!(control.ask(asked), reply::Kind::Quiesced(Quiesced { .. })));
        file.write_all_at(b"passes", 0).unwrap();
        assert!(resume(&control).held);
    });
}

#[test]
fn a_successor_does_not_know_what_is_mapped_and_refuses_a_pause() {
    let mut volume = Volume::with(SETUP);
    fs::metadata(&volume.path).unwrap();
    volume.kill();
    volume.take_over(SETUP);
    let asked = request::Kind::Quiesce(Quiesce { lease_ms: LONG_LEASE, passing_may_write: false });
    assert!(matches!(volume.control().ask(asked), reply::Kind::Refused(Refused { .. })));
}
