//! Applications that use one volume while everything is killed.

use crate::kills;
use crate::report::Target;
use crate::suite::{Class, Suite};

fn killed_under(names: &[&str], class: Class, short: usize) {
    let mut suite = Suite::start();
    suite.class = class;
    let volume = suite.volume();
    suite.applications(&volume, names);
    suite.progress();
    for _ in 0..kills(short) {
        suite.kill();
    }
    suite.finish();
}

const FIO: [&str; 3] = ["fio-direct", "fio-buffered", "fio-mapped"];

#[test]
fn fio_verifies_what_it_wrote_directly_buffered_and_through_mappings() {
    killed_under(&FIO, Class::ByDaemon, 5);
}

#[test]
fn fio_verifies_what_the_kernel_has_passed_through() {
    killed_under(&FIO, Class::Passing, 5);
}

#[test]
fn one_file_is_what_every_kind_of_write_has_made_of_it() {
    killed_under(&["file", "file"], Class::ByDaemon, 6);
}

#[test]
fn one_file_that_passes_through_is_what_every_kind_of_write_has_made_of_it() {
    killed_under(&["file", "file"], Class::Passing, 6);
}

#[test]
fn requests_of_all_sizes_are_answered_from_the_first_one_on() {
    let mut suite = Suite::start();
    let volume = suite.volume();
    suite.applications(&volume, &["blocks"]);
    suite.progress();
    for _ in 0..kills(10) {
        suite.kill_or_daemon(Target::Daemon);
    }
    suite.finish();
}

#[test]
fn every_change_of_a_name_is_made_once_and_answered_rightly() {
    killed_under(&["names"], Class::ByDaemon, 8);
}

#[test]
fn sqlite_loses_no_acknowledged_transaction() {
    killed_under(&["sqlite-journal", "sqlite-wal"], Class::ByDaemon, 5);
}

#[test]
fn names_and_databases_are_whole_in_a_volume_whose_data_passes_through() {
    killed_under(&["names", "sqlite-journal", "sqlite-wal", "postgres"], Class::Passing, 6);
}

#[test]
fn postgres_under_pgbench_loses_no_acknowledged_transaction() {
    killed_under(&["postgres"], Class::ByDaemon, 5);
}

#[test]
fn git_and_tar_find_no_difference() {
    killed_under(&["git", "archive"], Class::ByDaemon, 5);
}

#[test]
fn git_and_tar_find_no_difference_in_data_that_passes_through() {
    killed_under(&["git", "archive"], Class::Passing, 5);
}

#[test]
fn locks_exclude_other_processes_across_the_deaths_of_daemons() {
    let mut suite = Suite::start();
    let volume = suite.volume();
    suite.applications(&volume, &["lock-hold", "lock-count", "lock-count"]);
    // It has its locks with its first step.
    suite.progress();
    suite.application(&volume, "lock-try");
    suite.progress();
    for _ in 0..kills(4) {
        suite.kill();
    }
    suite.end_applications();
    let added = suite.reported("added");
    let number =
        suite.on_volume("read the number", move || std::fs::read_to_string(volume.path.join("locks/number")));
    assert_eq!(number.unwrap().trim(), added.to_string(), "two were in the critical section at a time");
    suite.finish();
}
