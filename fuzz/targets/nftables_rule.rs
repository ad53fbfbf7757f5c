//! A rule as it comes from the kernel, of whoever made it.
#![no_main]

use netfilter::nftables::Rule;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Ok(rule) = Rule::decode(input) else { return };
    assert!(rule.does(&rule.expressions));
    drop(rule.target_chain().map(str::to_owned));
});
