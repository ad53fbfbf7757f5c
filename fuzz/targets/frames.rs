//! A client's connection: rewritten in the same way however its bytes arrive.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| csi_driver::fuzzing::frames(input));
