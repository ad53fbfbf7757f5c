//! Manifests designed to keep the kubelet busy: each is read or refused in bounded time, the error
//! names the file and the limit, and valid documents beside it are read.

use std::time::Instant;

use kubelet::manifest::{Parsed, TIME, parse};

const HEAD: &str = "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec:\n";
const POD: &str =
    "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec:\n  containers: [{name: c, image: \"demo:1\"}]\n";

/// Reads the text within the kubelet's time limit.
fn read(bytes: &[u8]) -> Parsed {
    let begun = Instant::now();
    let parsed = parse(bytes, "web.yaml");
    assert!(!parsed.out_of_time, "over the time limit");
    assert!(begun.elapsed() < TIME, "took {:?}", begun.elapsed());
    parsed
}

/// The only error of a text without a valid object.
fn error(bytes: impl AsRef<[u8]>) -> String {
    let parsed = read(bytes.as_ref());
    assert_eq!((parsed.manifests.len(), parsed.errors.len()), (0, 1), "{:?}", parsed.errors);
    parsed.errors[0].to_string()
}

#[test]
fn two_thousand_unknown_fields_are_found_in_one_pass() {
    let container = |number| {
        format!("{{name: c{number}, image: \"demo:1\", restartPolicyRules: [{{action: Restart}}]}}, ")
    };
    let containers: String = (1..=2000).map(container).collect();
    let parsed = read(format!("{HEAD}  containers: [{containers}]\n").as_bytes());
    let warnings = &parsed.manifests[0].warnings;
    assert_eq!(warnings.len(), 21);
    assert!(
        warnings[0].contains(": spec.containers[0].restartPolicyRules is not supported: "),
        "{}",
        warnings[0]
    );
    assert_eq!(warnings[20], "Pod \"web\": 1980 more fields are not supported");
}

#[test]
fn twenty_thousand_misspelt_fields_end_in_time() {
    let fields: String = (0..20_000).map(|field| format!("  unknown{field}: 1\n")).collect();
    let parsed = read(format!("{POD}{fields}").as_bytes());
    assert_eq!((parsed.manifests.len(), parsed.errors.len()), (0, 20));
}

#[test]
fn twenty_thousand_unknown_fields_that_are_refused_end_in_time() {
    let volumes: String = (0..20_000).map(|volume| format!("{{name: v{volume}, nfs: x}}, ")).collect();
    let parsed = read(format!("{POD}  volumes: [{volumes}]\n").as_bytes());
    assert!(parsed.errors.iter().all(|error| error.place.file == "web.yaml"));
    assert!((1..=20).contains(&parsed.errors.len()), "{}", parsed.errors.len());
}

#[test]
fn deep_documents_are_refused_at_the_first_level_that_is_too_many() {
    let message = error("[".repeat(400_000));
    assert_eq!(message, "web.yaml:1:65: more than 64 levels of sequences and mappings: at most 64 are read");
    let mut maps: String = (0..2000).map(|level| format!("{}a:\n", " ".repeat(level))).collect();
    assert!(error(&maps).contains("more than 64 levels"), "{}", error(&maps));
    maps = format!("{}1{}", "{\"a\": ".repeat(100_000), "}".repeat(100_000));
    assert!(error(&maps).starts_with("web.yaml:1:385: more than 64 levels"), "{}", error(&maps));
    let dashes = "- ".repeat(200_000);
    assert!(error(&dashes).contains("more than 64 levels"), "{}", error(&dashes));
    let keys = "? ".repeat(200_000);
    error(&keys);
}

#[test]
fn aliases_count_as_their_expansion() {
    let mut bomb = "a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n".to_owned();
    for level in 1..10 {
        let before = level - 1;
        bomb += &format!("a{level}: &a{level} [{}]\n", vec![format!("*a{before}"); 9].join(", "));
    }
    assert!(error(&bomb).contains("more than 50000 values in this document"), "{}", error(&bomb));
}

#[test]
fn a_document_of_four_mebibytes_is_refused_and_the_one_beside_it_is_read() {
    let large = format!("{POD}  annotation: {}\n", "x".repeat(4 << 20));
    let message = error(&large);
    let bytes = large.len();
    assert_eq!(
        message,
        format!("web.yaml:1:1: the document has {bytes} bytes: at most 3145728 (3 MiB) are read")
    );
    let both = read(format!("{large}---\n{POD}").as_bytes());
    assert_eq!((both.manifests.len(), both.errors.len()), (1, 1));
    let file = error(vec![b'#'; (10 << 20) + 1]);
    assert_eq!(file, "web.yaml:1:1: the file has 10485761 bytes: at most 10485760 (10 MiB) are read");
}

#[test]
fn documents_and_their_values_are_counted() {
    let many: String = (0..10_000).map(|number| format!("---\n{{a: {number}}}\n")).collect();
    assert_eq!(error(&many), "web.yaml:2002:1: more than 1000 documents in this file: at most 1000 are read");
    let values = format!("a: [{}]\n", "1,".repeat(1 << 20));
    assert!(error(&values).contains("at most 50000 are read"), "{}", error(&values));
    // Blank lines, comments and a long text within the limit are accepted.
    let sparse = format!("{}{}", "\n# \n".repeat(1 << 18), POD);
    assert_eq!(read(sparse.as_bytes()).manifests.len(), 1);
    let text = format!("{POD}  hostnameOverride: |\n{}", "    x\n".repeat(400_000));
    assert_eq!(read(text.as_bytes()).manifests.len(), 1);
}

#[test]
fn bytes_that_are_not_text_are_refused_with_their_position() {
    assert_eq!(error(b"a: 1\nb: \0\n"), "web.yaml:2:4: a NUL byte: a manifest is text");
    assert_eq!(error(b"a: 1\n\xc3\xa4: \xff\n"), "web.yaml:2:4: a byte that is not UTF-8");
}

#[test]
fn messages_quote_only_the_beginning_of_a_value() {
    let message = error(format!("{POD}  restartPolicy: {}\n", "x".repeat(1 << 20)));
    assert!(message.len() < 2000, "{} bytes", message.len());
}

/// The same text must have the same meaning here and in a cluster.
#[test]
fn scalars_have_the_same_meaning_as_in_kubernetes() {
    let pod = |value: &str| {
        format!("{POD}  hostNetwork: yes\n  terminationGracePeriodSeconds: 010\n  nodeName: {value}\n")
    };
    let parsed = read(pod("\"yes\"").as_bytes());
    let text = format!("{:?}", parsed.manifests[0].object);
    assert!(
        text.contains("host_network: true") && text.contains("termination_grace_period_seconds: 8"),
        "{text}"
    );
    for (value, kind) in [("on", "a boolean"), ("0x10", "a number"), ("1.5", "a number")] {
        assert_eq!(
            error(pod(value)),
            format!(
                "web.yaml:8:13: Pod \"web\" is invalid: spec.nodeName: invalid type: {kind}, expected a string: put it in quotes"
            )
        );
    }
}

#[test]
fn a_duplicate_key_names_its_second_position() {
    assert_eq!(
        error(format!("{POD}  nodeName: a\n  nodeName: b\n")),
        "web.yaml:7:3: the key \"nodeName\" is in this mapping already"
    );
}

#[test]
fn json_has_its_own_escapes_and_may_be_on_one_line() {
    let json = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"web","annotations":{"a":"\ud83d\ude00\/\t"}},"spec":{"containers":[{"name":"c","image":"demo:1"}]}}"#;
    let parsed = read(json.as_bytes());
    assert_eq!(parsed.errors, []);
    assert_eq!(parsed.manifests[0].object.metadata().annotations["a"], "\u{1f600}/\t");
    let tabs = json.replace(',', ",\n\t\t");
    assert_eq!(read(tabs.as_bytes()).errors, []);
}

#[test]
fn fields_for_the_runtime_have_limits() {
    let long = "x".repeat(2 << 20);
    let path = format!("\"demo:1\", terminationMessagePath: \"/{long}\"");
    for (text, message) in [
        (POD.replace("demo:1", &long), "image: Too long: may not be more than 1024 bytes, has 2097152"),
        (
            POD.replace("\"demo:1\"", &path),
            "terminationMessagePath: Too long: may not be more than 4095 bytes, has 2097153",
        ),
    ] {
        assert!(error(text).ends_with(message), "{message}");
    }
    let (prefix, value) = (["a".repeat(60).as_str(); 3].join("."), "v".repeat(60));
    let labels: String = (0..1200).map(|n| format!("{prefix}/k{n}: {value}, ")).collect();
    let labelled = POD.replace("{name: web}", &format!("{{name: web, labels: {{{labels}}}}}"));
    let message = error(labelled);
    assert!(message.contains("metadata.labels: Too long: may not be more than 262144 bytes"), "{message}");
}
