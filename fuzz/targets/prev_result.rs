//! A configuration with prevResult: read, written in every version, read again.
#![no_main]

use cni_plugin::{CniResult, NetConf, ValidAttachments, Version};

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Ok(conf) = NetConf::parse(input.to_vec()) else { return };
    drop(ValidAttachments::read(&conf));
    let Ok(Some(result)) = conf.prev_result() else { return };
    for version in Version::ALL {
        let Ok(json) = result.to_json(version) else { continue };
        let again = CniResult::from_json(&json, version);
        assert!(again.is_ok(), "{again:?} of {json}");
    }
});
