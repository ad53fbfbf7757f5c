//! What a scraper reads.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use ::tests::operations::{operations, since};
use proto::control::{Quiesce, Resume, reply, request};

use crate::fixture::{Setup, Volume, errno};

fn answer(volume: &Volume, request: &[u8]) -> String {
    let mut scraper = volume.scraper();
    scraper.write_all(request).unwrap();
    let mut answer = String::new();
    scraper.read_to_string(&mut answer).unwrap();
    answer
}

fn scrape(volume: &Volume) -> String {
    let answer = answer(volume, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.0 200 OK\r\n"), "{head}");
    assert!(head.contains("Content-Type: text/plain; version=0.0.4"), "{head}");
    assert!(head.ends_with(&format!("Content-Length: {}", body.len())), "{head}");
    body.to_owned()
}

fn value(page: &str, name: &str) -> f64 {
    let line =
        page.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{name}: {page}"));
    line.trim().parse().unwrap()
}

/// How many requests of this operation the daemon has answered.
pub(crate) fn requests(volume: &Volume, operation: &str) -> u64 {
    let page = scrape(volume);
    let name = format!("hawser_volume_operations_total{{operation=\"{operation}\",");
    let counts = page.lines().filter_map(|line| line.strip_prefix(&name)?.split_once("} "));
    counts.map(|(_result, count)| count.parse::<u64>().unwrap()).sum()
}

/// Whether the kernel knows of the root alone.
pub(crate) fn knows_nothing(volume: &Volume) -> bool {
    scrape(volume).lines().any(|line| line == "hawser_volume_known_nodes 1")
}

#[test]
fn metrics_count_what_was_done() {
    let setup = Setup { capacity_bytes: 1 << 20, inode_limit: 50, confine: true, ..Setup::default() };
    let volume = Volume::with(setup);
    let before = volume.usage();
    let file = File::create(volume.path("f")).unwrap();
    for n in 0..5 {
        file.write_all_at(&[1; 1000], n * 1000).unwrap();
    }
    assert_eq!(errno(file.write_all_at(&vec![1; 2 << 20], 0)), libc::ENOSPC);
    // Not from the kernel's pages.
    fs::write(volume.backing.join("g"), "content").unwrap();
    fs::read(volume.path("g")).unwrap();
    // The kernel does not wait for the answer to a close.
    while value(&scrape(&volume), "hawser_volume_open_files") > 1.0 {
        std::thread::yield_now();
    }
    let control = volume.control();
    control.ask(request::Kind::Quiesce(Quiesce { lease_ms: 1000, passing_may_write: false }));
    assert!(matches!(control.ask(request::Kind::Resume(Resume {})), reply::Kind::Resumed(_)));
    let page = scrape(&volume);
    let usage = volume.usage();
    assert_eq!(value(&page, r#"hawser_volume_operations_total{operation="create",result="ok"}"#), 1.0);
    let writes = value(&page, r#"hawser_volume_operations_total{operation="write",result="ok"}"#);
    assert!(writes >= 6.0, "{writes}");
    assert_eq!(value(&page, "hawser_volume_refused_no_space_total"), 1.0);
    let count = value(&page, r#"hawser_volume_operation_seconds_count{operation="write"}"#);
    let failed = value(&page, r#"hawser_volume_operations_total{operation="write",result="error"}"#);
    assert_eq!(count, writes + failed);
    let written = value(&page, r#"hawser_volume_bytes_total{direction="written"}"#);
    assert!(written >= 1_000_000.0, "{written}");
    assert!(value(&page, r#"hawser_volume_bytes_total{direction="read"}"#) > 0.0);
    assert_eq!(value(&page, "hawser_volume_used_bytes"), usage.used_bytes as f64);
    assert_eq!(value(&page, "hawser_volume_used_inodes"), before.used_inodes as f64 + 1.0);
    assert_eq!(value(&page, "hawser_volume_capacity_bytes"), 1_048_576.0);
    assert_eq!(value(&page, "hawser_volume_open_files"), 1.0);
    assert!(value(&page, "hawser_volume_pause_seconds_total") > 0.0);
}

#[test]
fn a_scraper_that_says_nothing_or_nonsense_costs_others_nothing() {
    let volume = Volume::new();
    let mut silent: Vec<_> = (0..8).map(|_| volume.scraper()).collect();
    let start = Instant::now();
    assert!(scrape(&volume).contains("hawser_volume_known_nodes 1\n"));
    assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
    for scraper in &mut silent {
        assert_eq!(scraper.read(&mut [0; 1]).unwrap(), 0, "closed after a second");
    }
    assert!(answer(&volume, b"DELETE / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.0 400 Bad Request\r\n"));
    volume.usage();
}

/// The requests that `act` makes, with its RELEASE, which close(2) does not wait for.
fn requests_of(volume: &Volume, act: impl FnOnce()) -> Vec<(String, u64)> {
    let before = operations(&scrape(volume));
    act();
    let now = loop {
        let now = operations(&scrape(volume));
        let of = |name: &str| now.get(name).copied().unwrap_or_default();
        // A request is counted after its effect.
        if of("open") + of("create") == of("release") && of("opendir") == of("releasedir") {
            break now;
        }
        std::thread::yield_now();
    };
    since(&before, now).into_iter().collect()
}

fn names_of(requests: &[(&str, u64)]) -> Vec<(String, u64)> {
    requests.iter().map(|(name, number)| ((*name).to_owned(), *number)).collect()
}

/// The kernel is made to ask again for what was changed, two seconds later at most.
fn settle() {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(3) {
        std::thread::park_timeout(Duration::from_secs(1));
    }
}

#[test]
fn requests_are_as_few_as_the_kernel_allows() {
    let volume = Volume::with(Setup { confine: true, ..Setup::default() });
    let path = volume.path("d/f");
    fs::create_dir(volume.path("d")).unwrap();
    // The first close of a file that is open for reading and writing is a FLUSH: its answer ends these.
    let first = requests_of(&volume, || drop(File::create_new(volume.path("d/first")).unwrap()));
    assert!(first.contains(&("flush".to_owned(), 1)), "{first:?}");
    settle();
    fs::metadata(volume.path("d")).unwrap();
    let create = |name: &str| drop(File::create_new(volume.path(name)).unwrap());
    let created = requests_of(&volume, || create("d/f"));
    assert_eq!(created, names_of(&[("create", 1), ("lookup", 1), ("release", 1)]));
    // A change invalidates the directory's attributes.
    let created = requests_of(&volume, || create("d/g"));
    assert_eq!(created, names_of(&[("create", 1), ("getattr", 1), ("lookup", 1), ("release", 1)]));
    settle();
    fs::metadata(volume.path("d")).unwrap();
    let written = requests_of(&volume, || {
        let file = File::options().write(true).open(&path).unwrap();
        (0..3).for_each(|number| file.write_all_at(b"content", number * 7).unwrap());
    });
    assert_eq!(written, names_of(&[("getxattr", 1), ("open", 1), ("release", 1), ("write", 3)]));
    let read_once = || drop(fs::read(&path).unwrap());
    // It changes the access time, which the next fstat(2) asks for. Each is over with its RELEASE.
    for _ in 0..2 {
        requests_of(&volume, read_once);
    }
    let read = requests_of(&volume, read_once);
    assert_eq!(read, names_of(&[("open", 1), ("release", 1)]));
    fs::metadata(&path).unwrap();
    let looked = requests_of(&volume, || assert!((0..100).all(|_| fs::metadata(&path).is_ok())));
    assert_eq!(looked, []);
    let missing = || assert_eq!(errno(fs::metadata(volume.path("d/missing"))), libc::ENOENT);
    assert_eq!(requests_of(&volume, missing), names_of(&[("lookup", 1)]));
    assert_eq!(requests_of(&volume, missing), []);
    // The kernel has a directory's listing from the first one on. That one changed the access time, which the
    // second one asks for.
    let list = || assert_eq!(fs::read_dir(volume.path("d")).unwrap().count(), 3);
    requests_of(&volume, list);
    requests_of(&volume, list);
    settle();
    // As any page, it may have been reclaimed meanwhile.
    let listed = [list; 3].map(|list| requests_of(&volume, list));
    assert!(listed.contains(&names_of(&[("opendir", 1), ("releasedir", 1)])), "{listed:?}");
}
