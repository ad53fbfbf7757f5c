//! The driver's reply to Hello, as a daemon reads it.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| volume_fs::fuzzing::hello_reply(input));
