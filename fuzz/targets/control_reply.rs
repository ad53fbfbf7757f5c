//! A daemon's replies to the driver's requests.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| csi_driver::fuzzing::control_reply(input));
