//! A delegate's result: in 1.1.0 nothing of it is lost, and a shape that was
//! written once is written the same again.
#![no_main]

use cni_plugin::{CniResult, Version};

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let Ok(value) = serde_json::from_slice(input) else { return };
    let Ok(result) = CniResult::from_json(&value, Version::LATEST) else { return };
    let newest = result.to_json(Version::LATEST).expect("the newest shape says everything");
    assert_eq!(CniResult::from_json(&newest, Version::LATEST).as_ref(), Ok(&result));
    for version in Version::ALL {
        let Ok(json) = result.to_json(version) else { continue };
        let again = CniResult::from_json(&json, Version::LATEST).expect("what was written can be read");
        assert_eq!(again.to_json(version).as_ref(), Ok(&json));
    }
});
