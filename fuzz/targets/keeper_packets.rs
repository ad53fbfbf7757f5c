//! Packets of the keeper's sockets, in each direction.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| keeper::fuzzing::keeper_packets(input));
