//! portmap's configuration, prevResult and conditions included.
#![no_main]
#![allow(dead_code, reason = "the plugin's files have more than is fuzzed")]

mod call;
#[path = "../../cni-portmap/src/conditions.rs"]
mod conditions;
#[path = "../../cni-portmap/src/config.rs"]
mod config;
#[path = "../../cni-portmap/src/error.rs"]
mod error;
#[path = "../../cni-portmap/src/family.rs"]
mod family;
#[path = "../../cni-portmap/src/mapping.rs"]
mod mapping;

use family::Family;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(call) = call::with(input) else { return };
    for purpose in [config::Purpose::Keep, config::Purpose::Remove] {
        let Ok(config) = config::Config::read(&call, purpose) else { continue };
        for family in Family::BOTH {
            let rules = conditions::parse(config.conditions(family), family);
            assert!(rules.is_none_or(|rules| (1..=16).contains(&rules.len())));
            drop(mapping::in_family(&config.entries, family));
        }
        for entry in &config.entries {
            assert!(entry.host_port > 0 && entry.container_port > 0);
        }
    }
});
