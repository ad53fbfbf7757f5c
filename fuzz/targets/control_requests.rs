//! Requests to a serving daemon.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| volume_fs::fuzzing::control_requests(input));
