//! Image references: what is read is the same when it is written and read again.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| runtime::fuzzing::image_reference(input));
