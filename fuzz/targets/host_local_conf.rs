//! host-local's configuration: what is accepted has ranges that hand out
//! addresses of their own subnets, and never their gateway.
#![no_main]

mod call;

use ipam_host_local::Config;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Some(call) = call::with(input) else { return };
    let Ok(config) = Config::read(&call.conf, &call.args) else { return };
    assert!(!config.ranges.is_empty());
    for set in &config.ranges {
        for segment in set.round(None) {
            let range = segment.range;
            for ip in segment.addresses().take(64).chain([segment.last]) {
                assert!(set.contains(ip) && segment.contains(ip), "{ip} of {set}");
                assert!(range.subnet.contains(ip) && ip != range.gateway, "{ip} of {set}");
            }
        }
    }
});
