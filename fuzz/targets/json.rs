//! The reader of JSON text against serde_json's own: both take the same texts,
//! but for bytes that are no UTF-8, and find the same where no key comes twice.
#![no_main]

#[path = "../../cni-plugin/src/json.rs"]
#[allow(dead_code, reason = "the target uses a part of it")]
mod json;

use serde_json::Value;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let ours = json::parse(input);
    let Ok(text) = std::str::from_utf8(input) else { return };
    let theirs = serde_json::from_str::<Value>(text);
    assert_eq!(ours.is_ok(), theirs.is_ok(), "{ours:?} {theirs:?}");
    let (Ok(ours), Ok(theirs)) = (ours, theirs) else { return };
    // One pass makes keys unique; a second one finds nothing more to do.
    let again = json::parse(ours.to_string().as_bytes()).expect("what was written can be read");
    assert_eq!(rounded(again), rounded(ours.clone()));
    if !folds_together(&theirs) && theirs.to_string().len() == text.len() {
        assert_eq!(rounded(ours), rounded(theirs));
    }
});

/// Whether two keys of one object are the same to Go.
fn folds_together(value: &Value) -> bool {
    match value {
        Value::Object(map) => {
            let keys: Vec<&String> = map.keys().collect();
            let twice = keys
                .iter()
                .enumerate()
                .any(|(at, key)| keys[at + 1..].iter().any(|k| json::same_key(k, key)));
            twice || map.values().any(folds_together)
        }
        Value::Array(items) => items.iter().any(folds_together),
        _ => false,
    }
}

/// Zero has one sign; fractions are equal (their last digits depend on how they were read).
fn rounded(value: Value) -> Value {
    match value {
        Value::Number(number) if number.as_f64() == Some(0.0) => 0.into(),
        Value::Number(number) if number.is_f64() => 0.5.into(),
        Value::Array(items) => items.into_iter().map(rounded).collect(),
        Value::Object(map) => map.into_iter().map(|(k, v)| (k, rounded(v))).collect(),
        other => other,
    }
}
