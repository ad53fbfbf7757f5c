//! The bridge's configuration: an error or a configuration, never a panic.
#![no_main]
#![allow(dead_code, reason = "the plugin's files have more than is fuzzed")]

mod call;
#[path = "../../cni-bridge/src/config.rs"]
mod config;
#[path = "../../cni-bridge/src/keys.rs"]
mod keys;
#[path = "../../cni-bridge/src/vlan.rs"]
mod vlan;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(call) = call::with(input) else { return };
    if let Ok(config) = config::Config::read(&call) {
        assert!((1..=15).contains(&config.bridge.len()) && !config.bridge.contains(['/', '%']));
    }
});
