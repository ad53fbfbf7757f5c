//! Header blocks of HTTP/2: what is decoded is the same after it was encoded.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| csi_driver::fuzzing::header_blocks(input));
