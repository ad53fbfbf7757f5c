//! What a daemon sends in the hand-over.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| csi_driver::fuzzing::hello_and_answer(input));
