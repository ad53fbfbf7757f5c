//! `CNI_ARGS`: what is accepted is what was written last.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &str| {
    let Ok([mac, ip]) = cni_plugin::args::parse(input, ["MAC", "IP"]) else { return };
    for (key, value) in [("MAC=", mac), ("IP=", ip)] {
        let written = input.split(';').rfind(|pair| pair.starts_with(key)).map(|pair| &pair[key.len()..]);
        assert_eq!(written, value.as_deref());
    }
});
