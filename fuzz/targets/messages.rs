//! Messages of the hand-over and of the control socket.
#![no_main]

#[path = "messages/decoded.rs"]
mod decoded;

libfuzzer_sys::fuzz_target!(|input: &[u8]| decoded::same_again(input));
