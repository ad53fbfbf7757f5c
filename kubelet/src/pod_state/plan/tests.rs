use proto::cri::{ContainerMetadata, PodSandboxMetadata, PodSandboxState, PodSandboxStatus};

use super::*;
use crate::clients::cri::IMAGE_ANNOTATION;

fn pod(policy: &str) -> Pod {
    serde_json::from_value(serde_json::json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
        "spec": {"restartPolicy": policy, "containers": [{"name": "a"}, {"name": "b"}]}
    }))
    .unwrap()
}

fn sandbox(state: PodSandboxState) -> PodSandboxStatus {
    PodSandboxStatus {
        id: "s".into(),
        state: state.into(),
        metadata: Some(PodSandboxMetadata { attempt: 3, ..PodSandboxMetadata::default() }),
        ..PodSandboxStatus::default()
    }
}

fn instance(name: &str, number: u32, state: ContainerState, exit_code: i32) -> ContainerStatus {
    ContainerStatus {
        id: format!("{name}{number}"),
        metadata: Some(ContainerMetadata { name: name.into(), attempt: number }),
        state: state.into(),
        exit_code,
        finished_at: 1_000_000_000_000,
        ..ContainerStatus::default()
    }
}

fn container(name: &str, state: ContainerState, exit_code: i32) -> ContainerStatus {
    instance(name, 4, state, exit_code)
}

/// All containers were created in the sandbox.
fn observed(sandbox: PodSandboxStatus, containers: &[ContainerStatus]) -> Observed {
    let sandbox_of = containers.iter().map(|c| (c.id.clone(), sandbox.id.clone())).collect();
    Observed { sandboxes: vec![sandbox], containers: containers.to_vec(), sandbox_of }
}

fn plan(policy: &str, observed: &Observed) -> Vec<Action> {
    plan_of(&pod(policy), observed, &ProbeResults::default())
}

fn plan_of(pod: &Pod, observed: &Observed, probes: &ProbeResults) -> Vec<Action> {
    let (restarts, replaced) = (KeyedBackoff::default(), BTreeSet::new());
    run(&Situation { pod, observed, probes, restarts: &restarts, replaced: &replaced, now: now() })
}

/// In words, after restarts and replacements.
fn plan_after(
    pod: &Pod,
    observed: &Observed,
    restarts: &KeyedBackoff,
    replaced: &BTreeSet<String>,
) -> String {
    let probes = ProbeResults::default();
    words(&run(&Situation { pod, observed, probes: &probes, restarts, replaced, now: now() }))
}

fn now() -> Time {
    Time::from_second(1001).unwrap()
}

/// One word for each action.
fn words(plan: &[Action]) -> String {
    let word = |action: &Action| match action {
        Action::BackOff { container, remaining } => {
            format!("back-off:{container}:{}s", remaining.as_secs())
        }
        Action::Prepare => "prepare".to_owned(),
        Action::MountVolumes => "mount".to_owned(),
        Action::StopSandbox { id } => format!("stop:{id}"),
        Action::RemoveSandbox { id } => format!("remove:{id}"),
        Action::CreateSandbox { attempt } => format!("create:{attempt}"),
        Action::EnterSandbox { id, attempt } => format!("enter:{id}:{attempt}"),
        Action::PullImage { container } => format!("pull:{container}"),
        Action::Remove { container, id, number } => format!("remove:{container}:{id}:{number}"),
        Action::Start(start) => format!("start:{}:{}", start.container, start.restart_count),
        Action::Kill { targets, grace } => {
            let id = |target: &Target| match target.grace {
                Some(own) => format!("{}({}s)", target.id, own.as_secs()),
                None => target.id.clone(),
            };
            let ids: Vec<String> = targets.iter().map(id).collect();
            format!("kill:{}:{}s", ids.join("+"), grace.as_secs())
        }
        Action::Resize { containers } => format!("resize:{containers:?}"),
        Action::Finish => "finish".to_owned(),
    };
    plan.iter().map(word).collect::<Vec<_>>().join(" ")
}

use ContainerState::{ContainerCreated as Created, ContainerExited as Exited, ContainerRunning as Running};
use PodSandboxState::{SandboxNotready as NotReady, SandboxReady as Ready};

#[test]
fn a_new_pod_gets_a_sandbox_and_all_containers() {
    assert_eq!(
        words(&plan("Always", &Observed::default())),
        "prepare mount create:0 pull:0 start:0:0 pull:1 start:1:0"
    );
}

#[test]
fn an_adopted_running_pod_needs_no_action() {
    let observed = observed(sandbox(Ready), &[container("a", Running, 0), container("b", Running, 0)]);
    assert_eq!(plan("Always", &observed), []);
}

#[test]
fn the_restart_policy_decides_about_an_ended_container() {
    let observed = observed(sandbox(Ready), &[container("a", Exited, 0), container("b", Exited, 1)]);
    assert_eq!(
        words(&plan("Always", &observed)),
        "prepare mount enter:s:3 pull:0 start:0:5 pull:1 start:1:5"
    );
    assert_eq!(words(&plan("OnFailure", &observed)), "prepare mount enter:s:3 pull:1 start:1:5");
    assert_eq!(plan("Never", &observed), [Action::Finish]);
}

#[test]
fn a_lost_sandbox_is_replaced_unless_the_pod_never_restarts() {
    let lost = |a| observed(sandbox(NotReady), &[container("a", a, 0), container("b", Exited, 0)]);
    // What still runs gets its grace period first.
    assert_eq!(words(&plan("OnFailure", &lost(Running))), "kill:a4:30s");
    assert_eq!(words(&plan("Never", &lost(Running))), "kill:a4:30s");
    let replaced = |policy| match plan(policy, &lost(Running)).as_slice() {
        [Action::Kill { targets, .. }] if targets[0].cause.replaces() => BTreeSet::from(["a4".to_owned()]),
        _ => BTreeSet::new(),
    };
    let after = |policy| {
        let restarts = KeyedBackoff::default();
        plan_after(&pod(policy), &lost(Exited), &restarts, &replaced(policy))
    };
    assert_eq!(after("OnFailure"), "prepare mount stop:s create:4 pull:0 start:0:5");
    assert_eq!(after("Never"), "finish");
}

#[test]
fn of_the_sandboxes_of_a_pod_only_those_stay_that_show_something() {
    let sandboxes: Vec<PodSandboxStatus> = (0..5)
        .rev()
        .map(|attempt| PodSandboxStatus {
            id: format!("s{attempt}"),
            metadata: Some(PodSandboxMetadata { attempt, ..PodSandboxMetadata::default() }),
            ..sandbox(NotReady)
        })
        .collect();
    let containers = [instance("a", 2, Exited, 1), instance("a", 4, Exited, 1)];
    let sandbox_of = [("a2", "s2"), ("a4", "s4")].map(|(id, owner)| (id.to_owned(), owner.to_owned()));
    let observed = Observed { sandboxes, containers: containers.to_vec(), sandbox_of: sandbox_of.into() };
    let steps = words(&plan("Always", &observed));
    assert!(steps.starts_with("prepare mount stop:s4 remove:s3 remove:s1 create:5 pull:0 "), "{steps}");
}

#[test]
fn a_pod_that_has_ended_stays_so_though_some_of_its_containers_are_removed() {
    let mut pod = pod("OnFailure");
    let left = observed(sandbox(NotReady), &[container("b", Exited, 0)]);
    assert!(!has_ended_before(&pod, &left));
    pod.status.phase = objects::PodPhase::Succeeded;
    assert!(has_ended_before(&pod, &left));
    let runs = observed(sandbox(Ready), &[container("b", Running, 0)]);
    assert!(!has_ended_before(&pod, &runs), "its end comes first");
}

#[test]
fn containers_that_have_never_started_get_another_sandbox_with_any_policy() {
    let created = observed(sandbox(NotReady), &[instance("a", 0, Created, 0)]);
    for policy in ["Always", "OnFailure", "Never"] {
        let expected = "prepare mount stop:s create:4 pull:0 remove:0:a0:0 start:0:1 pull:1 start:1:0";
        assert_eq!(words(&plan(policy, &created)), expected, "{policy}");
    }
    let one_ran = observed(sandbox(NotReady), &[instance("a", 0, Exited, 0), instance("b", 0, Created, 0)]);
    assert_eq!(plan("Never", &one_ran), [Action::Finish]);
}

#[test]
fn a_crashing_container_waits_while_its_back_off_lasts() {
    let of_a = |b| observed(sandbox(Ready), &[container("a", Exited, 1), container("b", b, 1)]);
    let mut restarts = KeyedBackoff::default();
    restarts.step("a", now(), now());
    let plan = |observed: Observed| plan_after(&pod("Always"), &observed, &restarts, &BTreeSet::new());
    assert_eq!(plan(of_a(Running)), "back-off:0:9s");
    assert_eq!(plan(of_a(Exited)), "back-off:0:9s prepare mount enter:s:3 pull:1 start:1:5");
}

#[test]
fn only_the_newest_ended_instance_is_kept_for_a_restart() {
    let instances = [
        instance("a", 9, Created, 0),
        instance("a", 8, Exited, 1),
        instance("a", 7, Exited, 1),
        instance("b", 0, Running, 0),
    ];
    assert_eq!(
        words(&plan("Always", &observed(sandbox(Ready), &instances))),
        "prepare mount enter:s:3 pull:0 remove:0:a9:9 remove:0:a7:7 start:0:10"
    );
}

#[test]
fn a_pod_is_killed_before_its_resources_are_released() {
    let grace = Duration::from_secs(7);
    let containers = [container("a", Running, 0), container("b", Running, 0), container("c", Exited, 0)];
    let running = observed(sandbox(Ready), &containers);
    assert_eq!(words(&end(&running, grace)), "kill:a4+b4:7s");
    assert_eq!(words(&end(&observed(sandbox(Ready), &containers[2..]), grace)), "finish");
    assert_eq!(words(&end(&Observed::default(), grace)), "finish");
}

/// Init containers `i` and `j` and sidecar `s` between them, then container `a`.
fn pod_with_init(policy: &str) -> Pod {
    serde_json::from_value(serde_json::json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"},
        "spec": {
            "restartPolicy": policy,
            "initContainers": [
                {"name": "i"},
                {"name": "s", "restartPolicy": "Always", "startupProbe": {
                    "tcpSocket": {"port": 80}, "terminationGracePeriodSeconds": 3
                }},
                {"name": "j"},
            ],
            "containers": [{"name": "a"}]
        }
    }))
    .unwrap()
}

fn probed(results: &[(&str, ProbeKind, bool)]) -> ProbeResults {
    let mut probes = ProbeResults::default();
    for (id, kind, success) in results {
        probes.set(id, *kind, *success);
    }
    probes
}

#[test]
fn init_containers_run_one_after_another_and_a_sidecar_first_starts() {
    let pod = pod_with_init("Always");
    let started = probed(&[("s4", ProbeKind::Startup, true)]);
    let of = |containers: &[ContainerStatus], probes: &ProbeResults| {
        words(&plan_of(&pod, &observed(sandbox(Ready), containers), probes))
    };
    let none = ProbeResults::default();
    assert_eq!(words(&plan_of(&pod, &Observed::default(), &none)), "prepare mount create:0 pull:0 start:0:0");
    let enter = "prepare mount enter:s:3 ";
    let (i, s, j) = (container("i", Exited, 0), container("s", Running, 0), container("j", Exited, 0));
    assert_eq!(of(&[container("i", Running, 0)], &none), "");
    assert_eq!(of(std::slice::from_ref(&i), &none), format!("{enter}pull:1 start:1:0"));
    assert_eq!(of(&[i.clone(), s.clone()], &none), "", "the sidecar has not started");
    assert_eq!(of(&[i.clone(), s.clone()], &started), format!("{enter}pull:2 start:2:0"));
    assert_eq!(of(&[i.clone(), s.clone(), container("j", Running, 0)], &started), "");
    assert_eq!(of(&[i.clone(), s.clone(), j.clone()], &started), format!("{enter}pull:3 start:3:0"));
    let all = [i, s, j, container("a", Running, 0)];
    assert_eq!(of(&all, &started), "");
    assert_eq!(of(&all[3..], &none), format!("{enter}pull:1 start:1:0"), "only sidecars are kept");
}

#[test]
fn a_failed_init_container_runs_again_unless_the_pod_never_restarts() {
    let failed = observed(sandbox(Ready), &[container("i", Exited, 1)]);
    let of = |policy| words(&plan_of(&pod_with_init(policy), &failed, &ProbeResults::default()));
    assert_eq!(of("OnFailure"), "prepare mount enter:s:3 pull:0 start:0:5");
    assert_eq!(of("Never"), "finish");
    let beside = observed(sandbox(Ready), &[container("s", Running, 0), container("j", Exited, 1)]);
    let plan = plan_of(&pod_with_init("Never"), &beside, &ProbeResults::default());
    assert_eq!(words(&plan), "kill:s4:30s", "the sidecar ends before the pod");
}

#[test]
fn a_sidecar_runs_again_while_the_containers_run_and_ends_after_them() {
    let (pod, none) = (pod_with_init("Never"), ProbeResults::default());
    let of =
        |containers: &[ContainerStatus]| words(&plan_of(&pod, &observed(sandbox(Ready), containers), &none));
    let crashed = container("s", Exited, 0);
    assert_eq!(
        of(&[crashed.clone(), container("a", Running, 0)]),
        "prepare mount enter:s:3 pull:1 start:1:5"
    );
    assert_eq!(of(&[container("s", Running, 0), container("a", Exited, 0)]), "kill:s4:30s");
    assert_eq!(of(&[crashed, container("a", Exited, 0)]), "finish");
}

#[test]
fn all_init_containers_run_again_in_a_new_sandbox() {
    let containers = [container("i", Exited, 0), container("a", Exited, 1)];
    let pod = pod_with_init("Always");
    let none = ProbeResults::default();
    let lost = observed(sandbox(NotReady), &containers);
    assert_eq!(words(&plan_of(&pod, &lost, &none)), "prepare mount stop:s create:4 pull:0 start:0:5");
    let mut renewed = observed(sandbox(Ready), &containers);
    for old in ["i4", "a4"] {
        renewed.sandbox_of.insert(old.to_owned(), "earlier".to_owned());
    }
    assert_eq!(words(&plan_of(&pod, &renewed, &none)), "prepare mount enter:s:3 pull:0 start:0:5");
    renewed.sandbox_of.insert("i4".to_owned(), "s".to_owned());
    assert_eq!(words(&plan_of(&pod, &renewed, &none)), "prepare mount enter:s:3 pull:1 start:1:0");
}

#[test]
fn a_clock_that_steps_back_changes_nothing() {
    let (pod, none) = (pod_with_init("Always"), ProbeResults::default());
    let before = PodSandboxStatus { created_at: 20, ..sandbox(Ready) };
    let mut running = container("i", Running, 0);
    running.created_at = 10;
    assert_eq!(words(&plan_of(&pod, &observed(before.clone(), &[running]), &none)), "");
    let mut ended = container("i", Exited, 0);
    ended.created_at = 10;
    let plan = plan_of(&pod, &observed(before, &[ended]), &none);
    assert_eq!(words(&plan), "prepare mount enter:s:3 pull:1 start:1:0");
}

#[test]
fn a_container_that_runs_in_the_ready_sandbox_is_never_removed() {
    let instances = [instance("a", 9, Exited, 1), instance("a", 8, Running, 0), instance("a", 7, Running, 0)];
    let mut observed = observed(sandbox(Ready), &instances);
    observed.sandbox_of.insert("a7".to_owned(), "earlier".to_owned());
    let pod = pod("Always");
    let start = Start { container: 0, restart_count: 10, after: None };
    let situation = Situation {
        pod: &pod,
        observed: &observed,
        probes: &ProbeResults::default(),
        restarts: &KeyedBackoff::default(),
        replaced: &BTreeSet::new(),
        now: now(),
    };
    let plan = start_all(&situation, vec![start], Vec::new());
    assert_eq!(words(&plan), "prepare mount enter:s:3 pull:0 remove:0:a7:7 start:0:10");
}

#[test]
fn a_failed_probe_ends_its_container_and_another_starts() {
    let mut liveness = probed(&[("a4", ProbeKind::Liveness, false)]);
    let of = |policy, containers: &[ContainerStatus], probes: &ProbeResults| {
        words(&plan_of(&pod(policy), &observed(sandbox(Ready), containers), probes))
    };
    let b = container("b", Running, 0);
    assert_eq!(of("Never", &[container("a", Running, 0), b.clone()], &liveness), "kill:a4:30s");
    let ended = [container("a", Exited, 0), b];
    assert_eq!(of("OnFailure", &ended, &liveness), "", "its end has cut the probe off");
    liveness.note_kill("a4");
    assert_eq!(of("OnFailure", &ended, &liveness), "prepare mount enter:s:3 pull:0 start:0:5");
    assert_eq!(of("Never", &ended, &liveness), "");
    let startup = probed(&[("s4", ProbeKind::Startup, false)]);
    let sidecar = observed(sandbox(Ready), &[container("s", Running, 0)]);
    assert_eq!(words(&plan_of(&pod_with_init("Never"), &sidecar, &startup)), "kill:s4(3s):30s");
}

#[test]
fn a_changed_image_restarts_its_container_with_any_policy() {
    let mut pod = pod("Never");
    pod.spec.containers[0].image = "demo:2".to_owned();
    let started_with = |image: &str, container: ContainerStatus| {
        let annotations = [(IMAGE_ANNOTATION.to_owned(), image.to_owned())].into();
        ContainerStatus { annotations, ..container }
    };
    let both = [started_with("demo:1", container("a", Running, 0)), container("b", Running, 0)];
    let mut observed = observed(sandbox(Ready), &both);
    let stops = plan_of(&pod, &observed, &ProbeResults::default());
    let [Action::Kill { targets, .. }] = stops.as_slice() else { panic!("{stops:?}") };
    assert_eq!((targets.len(), targets[0].cause), (1, Cause::Changed));

    observed.containers[0] = started_with("demo:1", container("a", Exited, 0));
    let plan_with =
        |replaced: &BTreeSet<String>| plan_after(&pod, &observed, &KeyedBackoff::default(), replaced);
    assert_eq!(plan_with(&BTreeSet::from(["a4".to_owned()])), "prepare mount enter:s:3 pull:0 start:0:5");
    assert_eq!(plan_with(&BTreeSet::new()), "", "one that ended by itself stays");
    observed.containers[0] = started_with("demo:2", container("a", Running, 0));
    assert_eq!(plan_of(&pod, &observed, &ProbeResults::default()), []);
}

#[test]
fn only_a_crash_of_the_same_definition_waits_for_the_back_off() {
    let mut pod = pod("Always");
    pod.spec.containers[0].image = "demo:2".to_owned();
    let mut restarts = KeyedBackoff::default();
    restarts.step("a", now(), now());
    let ended_with = |image: &str| {
        let mut ended = container("a", Exited, 0);
        ended.annotations.insert(IMAGE_ANNOTATION.to_owned(), image.to_owned());
        observed(sandbox(Ready), &[ended, container("b", Running, 0)])
    };
    let stopped = BTreeSet::from(["a4".to_owned()]);
    let start = "prepare mount enter:s:3 pull:0 start:0:5";
    // The manifest had another image, which could not be pulled, and has the former one again.
    let back = ended_with("demo:2");
    assert_eq!(plan_after(&pod, &back, &restarts, &stopped), start);
    assert_eq!(plan_after(&pod, &back, &restarts, &BTreeSet::new()), "back-off:0:9s");
    assert_eq!(plan_after(&pod, &ended_with("demo:1"), &restarts, &BTreeSet::new()), start);

    let counts = |observed: &Observed, replaced: &BTreeSet<String>| {
        let (probes, now) = (ProbeResults::default(), now());
        let situation =
            Situation { pod: &pod, observed, probes: &probes, restarts: &restarts, replaced, now };
        instance_to_start(&situation, 0, "a").after.is_some()
    };
    assert!(!counts(&back, &stopped));
    assert!(!counts(&ended_with("demo:1"), &BTreeSet::new()));
    assert!(counts(&back, &BTreeSet::new()));
    let mut moved = ended_with("demo:2");
    moved.sandbox_of.insert("a4".to_owned(), "earlier".to_owned());
    assert!(counts(&moved, &stopped), "it was stopped for the loss of its sandbox");
}

#[test]
fn running_containers_and_sidecars_get_the_limits_of_a_changed_manifest() {
    use proto::cri::{ContainerResources, LinuxContainerResources};
    let mut pod = pod("Always");
    let limits = serde_json::json!({"name": "s", "restartPolicy": "Always", "resources": {"limits": {"memory": "2Mi"}}});
    pod.spec.init_containers = vec![serde_json::from_value(limits).unwrap()];
    pod.spec.containers[1].resources = pod.spec.init_containers[0].resources.clone();
    let limited = |name: &str, bytes: i64| {
        let linux =
            LinuxContainerResources { memory_limit_in_bytes: bytes, ..LinuxContainerResources::default() };
        let resources = Some(ContainerResources { linux: Some(linux) });
        ContainerStatus { resources, ..container(name, Running, 0) }
    };
    let all = |bytes| [limited("s", bytes), limited("a", bytes), limited("b", bytes)];
    let plan = |pod: &Pod, bytes| {
        words(&plan_of(pod, &observed(sandbox(Ready), &all(bytes)), &ProbeResults::default()))
    };
    assert_eq!(plan(&pod, 2 << 20), "");
    assert_eq!(plan(&pod, 1 << 20), "resize:[2, 0]");
    let policy = serde_json::json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}]);
    pod.spec.containers[1].resize_policy = serde_json::from_value(policy).unwrap();
    assert_eq!(plan(&pod, 1 << 20), "kill:b4:30s");
}
