//! docs/SEMANTICS.md and the tests say the same things.

const PAGE: &str = include_str!("../../../docs/SEMANTICS.md");
const TESTS: &[&str] = &[
    include_str!("accounting.rs"),
    include_str!("asynchronous.rs"),
    include_str!("attributes.rs"),
    include_str!("capacity.rs"),
    include_str!("confinement.rs"),
    include_str!("cuts.rs"),
    include_str!("directories.rs"),
    include_str!("files.rs"),
    include_str!("hand_over.rs"),
    include_str!("holes.rs"),
    include_str!("keepers.rs"),
    include_str!("known.rs"),
    include_str!("mapped.rs"),
    include_str!("metrics.rs"),
    include_str!("model.rs"),
    include_str!("ownership.rs"),
    include_str!("passthrough.rs"),
    include_str!("pauses.rs"),
    include_str!("remounts.rs"),
    include_str!("takeover.rs"),
    include_str!("trust.rs"),
    include_str!("writeback.rs"),
    include_str!("../../../csi-driver/tests/node/passthrough.rs"),
];

#[test]
fn every_promise_names_tests_that_exist() {
    let paragraphs: Vec<&str> =
        PAGE.split("\n\n").filter(|paragraph| !paragraph.starts_with('#')).skip(1).collect();
    assert!(paragraphs.len() > 15, "{} promises", paragraphs.len());
    for paragraph in paragraphs {
        let (_promise, tests) =
            paragraph.split_once("\nTests: ").unwrap_or_else(|| panic!("no test is named by: {paragraph}"));
        for test in tests.split(", ") {
            let name = test.trim().trim_matches('`');
            let definition = format!("\nfn {name}() {{");
            assert!(TESTS.iter().any(|file| file.contains(&definition)), "no test {name}");
        }
    }
}
