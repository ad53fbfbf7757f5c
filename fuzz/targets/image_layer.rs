//! A layer of an image: its entries change nothing but its own directory. Runs as root, as the
//! unpacker does.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let scratch = tempfile::tempdir().expect("there is a temporary directory");
    runtime::fuzzing::image_layer(input, scratch.path());
});
