//! A mount table: an error or entries, never a panic.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| drop(linux::mountinfo::parse(input)));
