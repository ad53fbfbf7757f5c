//! Selectors, formats, watches and waits, as transcripts.

use std::io::Write;
use std::sync::{Arc, Mutex};

use serde_json::json;
use tokio::sync::Notify;

use super::*;

/// A pod `name` with these labels.
fn pod(name: &str, labels: &str) -> String {
    POD.replace("{name: web}", &format!("{{name: {name}, labels: {{{labels}}}}}"))
}

impl Fixture {
    async fn apply(&self, text: &str) {
        let file = self.file("applied.yaml", text);
        self.run(&format!("apply -f {file}")).await.unwrap();
    }

    /// Runs a command while `steps` look at its output; ends it with them.
    async fn during<F: Future<Output = ()>>(&self, words: &str, steps: impl FnOnce(Screen) -> F) {
        let screen = Screen::default();
        let mut out = screen.clone();
        tokio::select! {
            ended = ask(self.command(words), &mut out) => panic!("{words} ended: {ended:?}\n{}", screen.text()),
            () = steps(screen.clone()) => {}
        }
    }
}

/// What a command has written so far.
#[derive(Debug, Clone, Default)]
struct Screen(Arc<(Mutex<Vec<u8>>, Notify)>);

impl Screen {
    fn text(&self) -> String {
        String::from_utf8(self.0.0.lock().unwrap().clone()).unwrap()
    }

    async fn wait_for(&self, text: &str) {
        let seen = async {
            while !self.text().contains(text) {
                self.0.1.notified().await;
            }
        };
        let seen = tokio::time::timeout(std::time::Duration::from_secs(20), seen).await;
        assert!(seen.is_ok(), "no {text:?} in\n{}", self.text());
    }
}

impl Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.0.lock().unwrap().extend_from_slice(bytes);
        self.0.1.notify_one();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// What a file leaves open is decided at the keyboard, and what it names is not.
#[tokio::test]
async fn files_are_applied_and_deleted_in_the_namespace_that_is_asked_for() {
    let fixture = Fixture::new();
    let claim = fixture.file("claim.yaml", CLAIM);
    fixture.run(&format!("apply -f {claim}")).await.unwrap();
    fixture.run(&format!("apply -n shop -f {claim}")).await.unwrap();
    fixture.run(&format!("delete -n shop -f {claim} --wait=false")).await.unwrap();
    let is_deleted = |namespace: &str| fixture.store.claim(namespace, "data").unwrap().metadata.is_deleted();
    assert_eq!([is_deleted("default"), is_deleted("shop")], [false, true]);

    let named = CLAIM.replace("{name: data}", "{name: data, namespace: default}");
    assert_ne!(named, CLAIM);
    let named = fixture.file("named.yaml", &named);
    for verb in ["apply", "delete"] {
        let error = fixture.run(&format!("{verb} -n shop -f {named}")).await.unwrap_err();
        let words = "the namespace from the provided object \"default\" does not match the namespace \"shop\". You must \
                     pass '--namespace=default' to perform this operation.";
        assert!(error.contains(words), "{verb}: {error}");
        assert!(!is_deleted("default"), "{verb}");
    }
    fixture.run(&format!("apply -n default -f {named}")).await.unwrap();
}

#[tokio::test]
async fn a_pod_is_named_with_any_name_of_its_kind_and_with_no_other_kind() {
    let fixture = Fixture::new();
    fixture.apply(&pod("web", "app: web")).await;
    for name in ["web", "pod/web", "po/web", "pods/web"] {
        let error = fixture.run(&format!("exec {name} -- sh")).await.unwrap_err();
        assert!(!error.contains("not found") && !error.contains("expected POD"), "{name}: {error}");
    }
    for command in ["logs pvc/web", "exec pvc/web -- sh", "attach pvc/web", "top pod pvc/web"] {
        let error = fixture.run(command).await.unwrap_err();
        assert!(error.contains("expected POD or pod/NAME"), "{command}: {error}");
    }
    let error = fixture.run("logs deploy/web").await.unwrap_err();
    assert!(error.contains("deploy"), "{error}");
}

#[tokio::test]
async fn what_is_not_there_keeps_nothing_from_being_described() {
    let fixture = Fixture::new();
    fixture.apply(&pod("web", "app: web")).await;
    let (printed, error) = fixture.both("describe pod gone web").await;
    assert!(printed.starts_with("Name: ") && printed.contains("web"), "{printed}");
    assert!(error.unwrap().contains("pods \"gone\" not found"));
    assert_eq!(fixture.both("describe pvc").await, (String::new(), None));
}

#[tokio::test]
async fn what_the_kubelet_writes_is_not_deleted_and_other_kinds_are_explained() {
    let fixture = Fixture::new();
    for (command, words) in [
        ("delete node node-1", "Node"),
        ("delete event x", "Event"),
        ("get ns", "a namespace needs no object"),
        ("delete sa default", "no service account"),
    ] {
        let error = fixture.run(command).await.unwrap_err();
        assert!(error.contains(words) && !error.contains("not found"), "{command}: {error}");
    }
}

#[tokio::test]
async fn the_items_of_a_list_are_applied_one_by_one() {
    let fixture = Fixture::new();
    let file = fixture.file("pods.yaml", &format!("{}---\n{CLAIM}", pod("web", "app: web")));
    fixture.run(&format!("apply -f {file}")).await.unwrap();
    let list = fixture.run("get pod/web pvc/data -o yaml").await.unwrap();
    assert!(list.starts_with("apiVersion: v1\nkind: List\n"), "{list}");
    fixture.run("delete pvc data --wait=false").await.unwrap();
    fixture.store.remove_claim("default", "data").unwrap();
    let file = fixture.file("list.yaml", &list);
    assert_eq!(
        fixture.run(&format!("apply -f {file}")).await.unwrap(),
        "pod/web configured\npersistentvolumeclaim/data created\n",
        "the list has a status and a uid, which the file has not"
    );
    let bad = list.replace("kind: Pod\n", "kind: Deployment\n");
    let file = fixture.file("bad.yaml", &bad);
    let (output, error) = fixture.both(&format!("apply -f {file}")).await;
    assert_eq!(output, "persistentvolumeclaim/data unchanged\n");
    let error = error.unwrap();
    assert!(
        error.starts_with("error: DIR/bad.yaml:7:9: kind: Unsupported value: \"Deployment\": "),
        "{error}"
    );
    assert!(error.contains("once for each replica"), "{error}");
    let empty = fixture.file("empty.yaml", "apiVersion: v1\nkind: List\nitems: []\n");
    assert_eq!(
        fixture.run(&format!("apply -f {empty}")).await.unwrap_err(),
        "error: DIR/empty.yaml: no objects in it"
    );
}

#[tokio::test]
async fn fields_that_kubernetes_does_not_have_are_refused_unless_asked_for() {
    let fixture = Fixture::new();
    let file = fixture.file("pod.yaml", &format!("{POD}  dnsPolcy: Default\n"));
    let refused = fixture.run(&format!("apply -f {file}")).await.unwrap_err();
    assert!(refused.contains("spec.dnsPolcy: unknown field, misspelt?"), "{refused}");
    for strict in ["--validate", "--validate=true", "--validate=strict"] {
        assert_eq!(fixture.run(&format!("apply {strict} -f {file}")).await.unwrap_err(), refused);
    }
    assert!(fixture.store.pods().is_empty());
    assert_eq!(fixture.run(&format!("apply --validate=warn -f {file}")).await.unwrap(), "pod/web created\n");
    let warned = |events: String| events.matches("dnsPolcy").count();
    assert_eq!(warned(fixture.run("get events").await.unwrap()), 1);
    let other = fixture.file("other.yaml", &format!("{}  dnsPolcy: x\n", pod("other", "")));
    for relaxed in ["ignore", "false"] {
        fixture.run(&format!("apply --validate={relaxed} -f {other}")).await.unwrap();
    }
    assert_eq!(warned(fixture.run("get events").await.unwrap()), 1);
    let value = fixture.run("get pod other -o jsonpath={.spec.dnsPolcy}").await.unwrap();
    assert_eq!(value, "x", "every applied field is given back");
}

#[tokio::test]
async fn objects_are_selected_by_labels_and_fields() {
    let fixture = Fixture::new();
    let pods = [pod("a", "app: web, tier: front"), pod("b", "app: web"), pod("c", "app: db")];
    fixture.apply(&pods.join("---\n")).await;
    fixture.set_status("b", running());
    for (words, names) in [
        ("-l app=web", "pod/a\npod/b\n"),
        ("-l app=web,tier!=front", "pod/b\n"),
        ("-l app!=web", "pod/c\n"),
        ("-l !tier", "pod/b\npod/c\n"),
        ("--field-selector status.phase=Running", "pod/b\n"),
        ("--field-selector metadata.name!=b -l app", "pod/a\npod/c\n"),
        ("-l app=none", ""),
        ("-l ", "pod/a\npod/b\npod/c\n"),
    ] {
        assert_eq!(fixture.run(&format!("get pods -o name {words}")).await.unwrap(), names, "{words}");
    }
    assert_eq!(
        fixture.run("get pods --field-selector spec.image=x").await.unwrap_err().split(" (").next().unwrap(),
        "error: field label not supported: spec.image"
    );
    assert_eq!(
        fixture.run("get pod a -l app=web").await.unwrap_err(),
        "error: name cannot be provided when a selector is specified"
    );
    for words in ["get pod ", "get pod/", "get pods a ", "describe pod ", "delete pod/"] {
        let error = fixture.run(words).await.unwrap_err();
        assert_eq!(error, "error: resource name may not be empty", "{words}");
    }
    for words in ["delete pods -l ", "delete pods --field-selector "] {
        let error = fixture.run(words).await.unwrap_err();
        assert_eq!(error, "error: resource(s) were provided, but no name was specified", "{words}");
    }
    assert_eq!(fixture.run("logs -l ").await.unwrap_err(), "error: a pod's name or --selector is required");
    assert_eq!(fixture.store.pods().len(), 3);
    let described = fixture.run("describe pods -l tier").await.unwrap();
    assert!(described.starts_with("Name: ") && !described.contains("app=db"), "{described}");
    let table = fixture.run("get pods -l app=web --show-labels -L tier --no-headers").await.unwrap();
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0][5..], ["front", "app=web,tier=front"], "{table}");
    assert_eq!(rows[1][5..], ["app=web"], "{table}");
    let head = fixture.run("get pods -L app.kubernetes.io/name --show-labels").await.unwrap();
    assert!(head.lines().next().unwrap().ends_with("AGE   NAME   LABELS"), "{head}");
}

#[tokio::test]
async fn formats_are_kubectls() {
    let fixture = Fixture::new();
    fixture.apply(&format!("{}---\n{}---\n{CLAIM}", pod("b", "app: web"), pod("a", "app: db"))).await;
    for (words, expected) in [
        ("get pod b -o jsonpath={.metadata.name}", "b"),
        ("get pods -o jsonpath={.items[*].metadata.name}", "a b"),
        ("get pods -o jsonpath={.items[?(@.metadata.labels.app==\"web\")].metadata.name}", "b"),
        ("get pods -o jsonpath={range\t.items[*]}{.metadata.name}{\"\\n\"}{end}", "a\nb\n"),
        (
            "get pods -o custom-columns=NAME:.metadata.name,NODE:.spec.none",
            "NAME   NODE\na      <none>\nb      <none>\n",
        ),
        (
            "get pods --no-headers -o custom-columns=N:metadata.labels.app --sort-by=.metadata.labels.app",
            "db\nweb\n",
        ),
        ("get pods --sort-by {.metadata.labels.app} -o name", "pod/a\npod/b\n"),
        ("get pvc,pods -o name", "persistentvolumeclaim/data\npod/a\npod/b\n"),
        ("get pod/b pod/a pvc/data -o name", "pod/b\npod/a\npersistentvolumeclaim/data\n"),
        ("get pod none --ignore-not-found -o yaml", ""),
        ("get pod none --ignore-not-found", ""),
    ] {
        assert_eq!(fixture.run(words).await.unwrap(), expected, "{words}");
    }
    let tables = fixture.run("get pods,pvc").await.unwrap();
    assert!(tables.starts_with("NAME    READY "), "{tables}");
    assert!(tables.contains("\npod/b   0/1 ") && tables.contains("\n\nNAME "), "{tables}");
    assert!(tables.contains("\npersistentvolumeclaim/data   Pending "), "{tables}");
    assert!(fixture.run("get all").await.unwrap().contains("\npod/a "));
    assert_eq!(
        fixture.run("get pods -o jsonpath={.items[5].kind}").await.unwrap_err(),
        "error: error executing jsonpath: array index out of bounds: index 5, length 2"
    );
    let (output, error) = fixture.both("get pod a none b -o name").await;
    assert_eq!(output, "pod/a\npod/b\n");
    assert_eq!(error.unwrap(), "Error from server (NotFound): pods \"none\" not found");
}

#[tokio::test]
async fn a_watch_prints_the_list_and_then_each_change() {
    let fixture = &Fixture::new();
    fixture.apply(&pod("a", "app: web")).await;
    fixture
        .during("get pods -w -l app=web", |screen| async move {
            screen.wait_for("a      0/1     Pending ").await;
            fixture.set_status("a", running());
            screen.wait_for("a      1/1     Running ").await;
            fixture.apply(&pod("other", "app: db")).await;
            fixture.apply(&pod("longer-name", "app: web")).await;
            screen.wait_for("longer-name   0/1     Pending ").await;
            let uid = fixture.store.pod("default", "longer-name").unwrap().metadata.uid.clone();
            fixture.store.forget_pod(&uid).unwrap();
            fixture.set_status("a", PodStatus::default());
            screen.wait_for("a             0/1     Pending ").await;
            let text = screen.text();
            assert!(text.starts_with("NAME   READY "), "{text}");
            assert!(!text.contains("other"), "{text}");
            assert_eq!(text.matches("longer-name").count(), 2, "its end is a row too: {text}");
        })
        .await;
}

#[tokio::test]
async fn a_watch_of_changes_only_has_no_list() {
    let fixture = &Fixture::new();
    fixture.apply(&format!("{}---\n{}", pod("a", ""), pod("b", ""))).await;
    fixture
        .during("get pods --watch-only -o name", |screen| async move {
            // The list may be made after a change: then there must be another one.
            let mut phase = PodPhase::Pending;
            for _ in 0..1000 {
                phase = if phase == PodPhase::Pending { PodPhase::Running } else { PodPhase::Pending };
                fixture.set_status("b", PodStatus { phase, ..PodStatus::default() });
                let seen = screen.wait_for("pod/b\n");
                if tokio::time::timeout(std::time::Duration::from_millis(20), seen).await.is_ok() {
                    break;
                }
            }
            screen.wait_for("pod/b\n").await;
            assert!(!screen.text().contains("pod/a\n"), "{}", screen.text());
        })
        .await;
    assert_eq!(
        fixture.run("get pods,pvc -w").await.unwrap_err(),
        "error: you may only specify a single resource type"
    );
    assert_eq!(
        fixture.run("get pod none -w").await.unwrap_err(),
        "Error from server (NotFound): pods \"none\" not found"
    );
}

#[tokio::test]
async fn events_are_those_of_an_object_and_of_a_type() {
    let fixture = &Fixture::new();
    fixture.apply(&format!("{}---\n{}", pod("a", ""), pod("b", ""))).await;
    for (name, kind, reason) in [
        ("a", EventType::Warning, "FailedMount"),
        ("b", EventType::Normal, "Started"),
        ("a", EventType::Normal, "Pulled"),
    ] {
        let pod = fixture.store.pod("default", name).unwrap();
        fixture.store.record(&pod.reference(), kind, reason, "text");
        fixture.store.record(&pod.reference(), kind, reason, "text");
    }
    let reasons = |table: String| {
        let cell = |line: &str| {
            line.split_whitespace()
                .find(|word| ["FailedMount", "Started", "Pulled"].contains(word))
                .map(str::to_owned)
        };
        table.lines().filter_map(cell).collect::<Vec<_>>()
    };
    for (words, expected) in [
        ("--for pod/a", &["FailedMount", "Pulled"][..]),
        ("--types Warning --for pod/a", &["FailedMount"]),
        ("--types=normal,Warning -A --for pods/b", &["Started"]),
        ("--for pod/none", &[]),
    ] {
        assert_eq!(reasons(fixture.run(&format!("events {words}")).await.unwrap()), expected, "{words}");
    }
    let table = fixture.run("events --for pod/a").await.unwrap();
    assert!(table.starts_with("LAST SEEN "), "{table}");
    assert!(table.contains(" (x2 over ") && table.contains("Pod/a "), "{table}");
    assert_eq!(
        fixture.run("events --for pod/a --types Warning -o jsonpath={.items[*].reason}").await.unwrap(),
        "UnsupportedField FailedMount"
    );
    fixture
        .during("events -w --no-headers --types Warning", |screen| async move {
            screen.wait_for("FailedMount").await;
            let pod = fixture.store.pod("default", "b").unwrap();
            fixture.store.record(&pod.reference(), EventType::Normal, "Killing", "text");
            fixture.store.record(&pod.reference(), EventType::Warning, "BackOff", "text");
            screen.wait_for("BackOff").await;
            assert!(!screen.text().contains("Killing"), "{}", screen.text());
        })
        .await;
}

/// The status of the pod before its last change is of no use.
#[tokio::test]
async fn wait_looks_at_conditions_of_the_present_generation() {
    let fixture = Fixture::new();
    fixture.apply(&pod("a", "app: web")).await;
    fixture.apply(&pod("a", "app: web").replace("demo:1", "demo:2")).await;
    assert_eq!(fixture.run("get pod a -o jsonpath={.metadata.generation}").await.unwrap(), "2");
    for (observed, is_met) in [(json!(1), false), (json!(2), true), (json!(null), true)] {
        let mut condition = json!({"type": "Ready", "status": "True"});
        if !observed.is_null() {
            condition["observedGeneration"] = observed.clone();
        }
        let conditions = serde_json::from_value(json!([condition])).unwrap();
        fixture.set_status("a", PodStatus { conditions, ..running() });
        let waited = fixture.run("wait pod/a --for=condition=Ready --timeout=0").await;
        assert_eq!(waited.is_ok(), is_met, "{observed}: {waited:?}");
    }
}

#[tokio::test]
async fn wait_ends_when_the_condition_holds_or_the_time_is_over() {
    let fixture = &Fixture::new();
    fixture.apply(&format!("{}---\n{}", pod("a", "app: web"), pod("b", "app: web"))).await;
    let ready = |status: &str| {
        let condition = json!([{"type": "Ready", "status": status}]);
        PodStatus { conditions: serde_json::from_value(condition).unwrap(), ..running() }
    };
    let (waited, ()) = tokio::join!(fixture.run("wait pods -l app=web --for=condition=Ready"), async {
        fixture.set_status("b", ready("True"));
        fixture.set_status("a", ready("True"));
    });
    let mut lines: Vec<String> = waited.unwrap().lines().map(str::to_owned).collect();
    lines.sort();
    assert_eq!(lines, ["pod/a condition met", "pod/b condition met"]);
    for (words, expected) in [
        ("pod/a --for=jsonpath={.status.phase}=Running --timeout=0", "pod/a condition met\n"),
        ("pod a --for condition=ready", "pod/a condition met\n"),
        ("pod/none --for=delete", ""),
        ("pods --all -n none --for=delete", ""),
    ] {
        assert_eq!(fixture.run(&format!("wait {words}")).await.unwrap(), expected, "{words}");
    }
    for (words, expected) in [
        ("pod/a --for=condition=Ready=false --timeout=0s", "error: condition not met for pods/a"),
        ("pod/a --for=delete --timeout=100ms", "error: timed out waiting for the condition on pods/a"),
        ("pod/none --for=condition=Ready", "Error from server (NotFound): pods \"none\" not found"),
        ("pods -l app=none --for=condition=Ready", "error: no matching resources found"),
        ("pods --for=delete", "error: resource name or --all or --selector is required"),
        ("--for=delete pods -l ", "error: resource name or --all or --selector is required"),
        ("--for=delete pod ", "error: resource name may not be empty"),
    ] {
        assert_eq!(fixture.run(&format!("wait {words}")).await.unwrap_err(), expected, "{words}");
    }
    let uid = fixture.store.pod("default", "a").unwrap().metadata.uid.clone();
    let (gone, made, ()) = tokio::join!(
        fixture.run("wait pod/a --for=delete"),
        fixture.run("wait pvc/data --for=create"),
        async {
            fixture.store.forget_pod(&uid).unwrap();
            fixture.apply(CLAIM).await;
        }
    );
    assert_eq!(made.unwrap(), "persistentvolumeclaim/data condition met\n");
    let gone = gone.unwrap();
    assert!(gone == "pod/a condition met\n" || gone.is_empty(), "{gone}");
}

#[tokio::test]
async fn deletions_go_by_label_by_file_and_all_at_once() {
    let fixture = &Fixture::new();
    let pods = ["a", "b", "c"].map(|name| pod(name, if name == "c" { "app: db" } else { "app: web" }));
    fixture.apply(&pods.join("---\n")).await;
    assert_eq!(
        fixture.run("delete pods").await.unwrap_err(),
        "error: resource(s) were provided, but no name was specified"
    );
    assert_eq!(fixture.run("delete pods -l app=none").await.unwrap(), "No resources found\n");
    let deleted = fixture.run("delete pods -l app=web --now --wait=false").await.unwrap();
    assert_eq!(deleted, "pod \"a\" deleted\npod \"b\" deleted\n");
    let grace =
        |name: &str| fixture.store.pod("default", name).unwrap().metadata.deletion_grace_period_seconds;
    assert_eq!([grace("a"), grace("b"), grace("c")], [Some(1), Some(1), None]);
    let timed_out = fixture.run("delete pods --all --timeout 100ms -o name").await.unwrap_err();
    assert!(timed_out.starts_with("error: timed out waiting for the condition on pods/"), "{timed_out}");
    assert_eq!(grace("c"), Some(30));
    for pod in fixture.store.pods() {
        fixture.store.forget_pod(&pod.metadata.uid).unwrap();
    }

    fixture.apply(&pods.join("---\n")).await;
    let text = format!("{}---\nkind: Odd\n---\n{}---\n{}", pods[0], pod("none", ""), pods[1]);
    let file = fixture.file("some.yaml", &text);
    let forget = async {
        let mut changes = fixture.store.subscribe();
        while fixture.store.pods().iter().filter(|pod| pod.metadata.is_deleted()).count() < 2 {
            changes.recv().await.unwrap();
        }
        // Both are marked before the command waits for either.
        for pod in fixture.store.pods().iter().filter(|pod| pod.metadata.is_deleted()) {
            fixture.store.forget_pod(&pod.metadata.uid).unwrap();
        }
    };
    let command = format!("delete -f {file} --ignore-not-found");
    let ((output, error), ()) = tokio::join!(fixture.both(&command), forget);
    assert_eq!(output, "pod \"b\" deleted\npod \"a\" deleted\n");
    assert!(error.unwrap().contains("kind: Unsupported value: \"Odd\""));
}

#[tokio::test]
async fn logs_are_cut_prefixed_and_joined() {
    let fixture = Fixture::new();
    let two = POD.replace("  overhead", "  - name: d\n    image: demo:1\n  overhead");
    fixture.apply(&format!("{}---\n{}", two, pod("other", "app: web"))).await;
    let both = vec![
        container("c", ContainerState::Running(ContainerStateRunning::default())),
        container("d", ContainerState::Running(ContainerStateRunning::default())),
    ];
    fixture.set_status("web", PodStatus { container_statuses: both, ..running() });
    fixture.set_status("other", running());
    for (pod, container, lines) in [("web", "c", 12), ("web", "d", 1), ("other", "c", 12)] {
        let uid = fixture.store.pod("default", pod).unwrap().metadata.uid.clone();
        let log = fixture
            .dir
            .path()
            .join("logs")
            .join(format!("default_{pod}_{uid}"))
            .join(container)
            .join("0.log");
        std::fs::create_dir_all(log.parent().unwrap()).unwrap();
        for second in 0..lines {
            append(&log, &format!("2026-11-20T17:53:{second:02}.5Z stdout F {container}{second}\n"));
        }
    }
    for (words, expected) in [
        ("web --tail=2", "c10\nc11\n"),
        ("web --tail 0", ""),
        ("web c --tail 1", "c11\n"),
        ("pod/web -c d", "d0\n"),
        ("web --since-time=2026-11-20T17:53:11Z", "c11\n"),
        ("web --since 5s", ""),
        ("web --tail 1 --timestamps", "2026-11-20T17:53:11.5Z c11\n"),
        ("web --limit-bytes 5", "c0\nc1"),
        ("web --all-containers --tail 1 --prefix", "[pod/web/c] c11\n[pod/web/d] d0\n"),
    ] {
        assert_eq!(fixture.run(&format!("logs {words}")).await.unwrap(), expected, "{words}");
    }
    let selected = fixture.run("logs -l app=web").await.unwrap();
    assert_eq!(selected.lines().count(), 10, "{selected}");
    assert_eq!(fixture.run("logs -l app=web --tail -1").await.unwrap().lines().count(), 12);
    assert_eq!(fixture.run("logs -l app=none").await.unwrap(), "");
    assert_eq!(
        fixture.run("logs web --all-containers -f --max-log-requests 1").await.unwrap_err(),
        "error: you are attempting to follow 2 log streams, but maximum allowed concurrency is 1, \
         use --max-log-requests to increase the limit"
    );
    let ended = |name| container(name, ContainerState::Terminated(ContainerStateTerminated::default()));
    let (followed, ()) = tokio::join!(fixture.run("logs web --all-containers -f --tail 1 --prefix"), async {
        fixture
            .set_status("web", PodStatus { container_statuses: vec![ended("c"), ended("d")], ..running() });
    });
    let mut lines: Vec<String> = followed.unwrap().lines().map(str::to_owned).collect();
    lines.sort();
    assert_eq!(lines, ["[pod/web/c] c11", "[pod/web/d] d0"]);
}

fn completion(shell: &str) -> String {
    let mut out = Vec::new();
    let command = Cli::try_parse_from(["hawser-kubelet", "completion", shell]).unwrap().command;
    let Command::Client(command) = command else { panic!("a client command") };
    let ClientCommand::Completion(args) = *command else { panic!("completion") };
    super::super::completion::completion(&args, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

#[test]
fn shells_get_their_code() {
    for (shell, text) in [
        ("bash", "complete -F _hawserkubelet -o nosort"),
        ("zsh", "#compdef hawser-kubelet"),
        ("fish", "complete -c hawser-kubelet"),
    ] {
        let code = completion(shell);
        assert!(code.contains(text) && code.contains("field-selector"), "{shell}");
    }
}

#[test]
fn bash_completes_commands_flags_and_names() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("completion");
    std::fs::write(&file, completion("bash")).unwrap();
    let script = r#"
        source "$1"; shift
        hawser-kubelet() { [[ $* == "get pods -n shop -o "* ]] && echo web worker; [[ $* == "get pvc -o "* ]] && echo data; }
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
        _hawser-kubelet-names hawser-kubelet "${@: -1}" "${@: -2:1}"
        echo "${COMPREPLY[*]}"
    "#;
    for (words, expected) in [
        ("hawser-kubelet desc", "describe"),
        ("hawser-kubelet get --watch-o", "--watch-only"),
        ("hawser-kubelet get -n shop pods w", "web worker"),
        ("hawser-kubelet delete -l x=y pvc ", "data"),
        ("hawser-kubelet logs -n shop --tail 5 wo", "worker"),
    ] {
        let bash = std::process::Command::new("bash")
            .args(["--norc", "-c", script, "bash"])
            .arg(&file)
            .args(words.split(' '))
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&bash.stdout).trim(), expected, "{words}: {bash:?}");
    }
}
