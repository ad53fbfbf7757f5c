//! Files of the driver's journal: an error or an entry, which is kept when it is written.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| csi_driver::fuzzing::journal_entry(input));
