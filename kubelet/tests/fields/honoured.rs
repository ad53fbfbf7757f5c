//! The tests of the fields that have an effect.

use kubelet::objects::Kind;

use crate::walk::covers;

/// A field, or an object that is read as one unit with everything in it.
#[derive(Debug, PartialEq)]
pub(crate) struct Row {
    pub(crate) kind: Kind,
    pub(crate) field: &'static str,
    /// Functions of the workspace; each field of the row occurs in the file of one of them.
    pub(crate) tests: &'static [&'static str],
}

const fn row(kind: Kind, field: &'static str, tests: &'static [&'static str]) -> Row {
    Row { kind, field, tests }
}

/// The nearest row that covers the field.
pub(crate) fn row_of(kind: Kind, field: &str) -> Option<&'static Row> {
    let rows = HONOURED.iter().filter(|row| row.kind == kind && covers(row.field, field));
    rows.max_by_key(|row| row.field.len())
}

use Kind::{
    ConfigMap, CsiDriver as Driver, PersistentVolume as Volume, PersistentVolumeClaim as Claim, Pod, Secret,
    StorageClass as Class, VolumeSnapshot as Snapshot, VolumeSnapshotClass as SnapshotClass,
    VolumeSnapshotContent as Content,
};

const KINDS: &[&str] = &["unknown_kinds_and_versions_are_refused_with_the_known_ones"];
const NAMES: &[&str] = &["names_follow_dns", "every_broken_rule_is_reported_at_once"];
const DOCUMENT: &[&str] = &["a_document_is_kept_whole_and_survives"];
const LABELS: &[&str] = &["whole_maps_are_lines_with_quoted_values"];
const CONTAINER: &[&str] = &["the_runtime_gets_what_a_container_asks_for"];
const SANDBOX: &[&str] = &["the_runtime_gets_what_a_pod_asks_for"];
const SHARED: &[&str] = &["the_runtime_gets_what_a_pod_asks_for", "a_pod_shares_what_its_yaml_asks_for"];
const MESSAGE: &[&str] = &["the_message_of_a_container_is_the_end_of_its_file_or_of_its_log"];
const VARIABLES: &[&str] = &[
    "values_see_the_variables_before_them_and_the_pod",
    "whole_objects_come_first_and_are_replaced_by_single_variables",
];
const FILES: &[&str] =
    &["configuration_is_mounted_and_updated_while_the_pod_runs", "keys_become_files_with_their_modes"];
const PROBES: &[&str] = &[
    "probes_decide_about_readiness_and_restarts",
    "a_decision_needs_its_threshold_in_a_row",
    "absent_numbers_and_zero_are_kubernetes_defaults",
    "mistakes_in_probes_and_hooks_are_named",
];
const EXEC: &[&str] = &["probes_decide_about_readiness_and_restarts", "literal_variables_stand_in_a_command"];
const HTTP: &[&str] = &[
    "a_request_has_kubelets_headers_and_those_of_the_probe",
    "statuses_are_judged_as_kubelet_does",
    "https_takes_any_certificate",
];
const TCP: &[&str] = &["a_port_that_opens_is_success", "a_port_by_name_is_the_containers"];
const GRPC: &[&str] =
    &["a_grpc_probe_follows_the_health_of_its_service", "only_a_serving_service_is_healthy"];
const HOOKS_BY_HTTP: &[&str] = &["a_hook_sends_a_request_to_the_pod", "https_takes_any_certificate"];
const BINDING: &[&str] = &["a_volume_requested_by_name_must_satisfy_the_claim"];
const PROVISIONING: &[&str] = &["a_volume_is_made_as_claim_and_class_say"];
const SOURCE: &[&str] = &["a_claim_with_a_data_source_gets_a_new_volume_or_one_reserved_for_it"];
const SECRETS: &[&str] = &["every_call_has_the_secrets_that_the_class_names_and_nothing_else_has_them"];
const SNAPSHOTS: &[&str] = &["a_snapshot_is_retried_until_it_is_complete_and_deleted_by_its_policy"];
const HANDLES: &[&str] = &["a_retained_snapshot_comes_back_by_its_handle"];
const REGISTRIES: &[&str] = &["a_pod_pulls_with_the_login_of_its_secret"];

pub(crate) static HONOURED: &[Row] = &[
    row(Pod, "apiVersion", KINDS),
    row(Pod, "kind", KINDS),
    row(Pod, "metadata.name", NAMES),
    row(Pod, "metadata.namespace", NAMES),
    row(Pod, "metadata.labels", LABELS),
    row(Pod, "metadata.annotations", LABELS),
    row(Pod, "spec.activeDeadlineSeconds", &["a_pod_ends_at_its_deadline_and_stays_failed"]),
    row(Pod, "spec.restartPolicy", &["the_restart_policy_decides_about_an_ended_container"]),
    row(Pod, "spec.terminationGracePeriodSeconds", &["hooks_run_within_the_grace_period"]),
    row(Pod, "spec.readinessGates", &["ready_needs_containers_sidecars_and_gates", "open_gates_are_counted"]),
    row(Pod, "spec.dnsConfig", SANDBOX),
    row(Pod, "spec.dnsPolicy", SANDBOX),
    row(Pod, "spec.hostAliases", &["aliases_are_lines_of_their_own"]),
    row(Pod, "spec.hostIPC", SHARED),
    row(Pod, "spec.hostNetwork", SANDBOX),
    row(Pod, "spec.hostPID", SANDBOX),
    row(Pod, "spec.shareProcessNamespace", SHARED),
    row(Pod, "spec.hostname", &["the_host_name_is_the_pods_name_unless_the_pod_says_otherwise"]),
    row(Pod, "spec.setHostnameAsFQDN", &["a_subdomain_makes_a_domain_and_if_asked_a_whole_name"]),
    row(Pod, "spec.subdomain", &["a_subdomain_makes_a_domain_and_if_asked_a_whole_name"]),
    row(Pod, "spec.imagePullSecrets", REGISTRIES),
    row(Pod, "spec.nodeName", &["host_ports_and_node_names_are_checked"]),
    row(Pod, "spec.os", &["a_pod_of_another_system_is_refused"]),
    row(Pod, "spec.priority", &["the_kernel_kills_node_critical_pods_last", "a_high_priority_is_critical"]),
    row(Pod, "spec.priorityClassName", &["the_kernel_kills_node_critical_pods_last"]),
    row(Pod, "spec.serviceAccountName", &["variables_see_the_node_and_the_addresses"]),
    row(Pod, "spec.securityContext", CONTAINER),
    row(Pod, "spec.securityContext.sysctls", SANDBOX),
    row(
        Pod,
        "spec.securityContext.fsGroup",
        &["the_hosts_files_keep_their_group_while_an_empty_dir_is_given_to_the_pods"],
    ),
    row(
        Pod,
        "spec.securityContext.fsGroupChangePolicy",
        &["the_group_is_changed_once_per_pod", "on_root_mismatch_walks_when_the_root_lacks_setgid"],
    ),
    row(
        Pod,
        "spec.securityContext.runAsNonRoot",
        &["an_image_whose_user_is_a_name_does_not_run_where_root_is_refused"],
    ),
    row(Pod, "spec.containers[*].name", CONTAINER),
    row(Pod, "spec.containers[*].image", CONTAINER),
    row(
        Pod,
        "spec.containers[*].imagePullPolicy",
        &[
            "only_a_moving_tag_is_always_pulled",
            "what_kept_a_container_from_starting_or_killed_it_is_its_reason",
        ],
    ),
    row(Pod, "spec.containers[*].command", CONTAINER),
    row(Pod, "spec.containers[*].args", CONTAINER),
    row(Pod, "spec.containers[*].workingDir", CONTAINER),
    row(Pod, "spec.containers[*].env", VARIABLES),
    row(Pod, "spec.containers[*].envFrom", VARIABLES),
    row(Pod, "spec.containers[*].ports", SANDBOX),
    row(
        Pod,
        "spec.containers[*].ports[*].name",
        &["a_port_by_name_is_the_containers", "mistakes_in_probes_and_hooks_are_named"],
    ),
    row(Pod, "spec.containers[*].resizePolicy", &["a_difference_names_the_resource_and_the_policy_decides"]),
    row(Pod, "spec.containers[*].resources", &["the_class_and_its_cgroup_follow_requests_and_limits"]),
    row(Pod, "spec.containers[*].volumeMounts", CONTAINER),
    row(
        Pod,
        "spec.containers[*].volumeMounts[*].subPath",
        &["parts_of_volumes_are_mounted_and_nothing_of_them_is_left"],
    ),
    row(
        Pod,
        "spec.containers[*].volumeMounts[*].subPathExpr",
        &["parts_of_volumes_are_mounted_and_nothing_of_them_is_left"],
    ),
    row(Pod, "spec.containers[*].securityContext", CONTAINER),
    row(Pod, "spec.containers[*].stdin", &["a_container_reads_what_an_attached_command_reads"]),
    row(Pod, "spec.containers[*].stdinOnce", &["a_container_reads_what_an_attached_command_reads"]),
    row(Pod, "spec.containers[*].tty", &["a_terminal_is_connected_with_that_of_a_container_and_restored"]),
    row(Pod, "spec.containers[*].terminationMessagePath", MESSAGE),
    row(Pod, "spec.containers[*].terminationMessagePolicy", MESSAGE),
    row(Pod, "spec.containers[*].startupProbe", PROBES),
    row(Pod, "spec.containers[*].startupProbe.exec", EXEC),
    row(Pod, "spec.containers[*].startupProbe.httpGet", HTTP),
    row(Pod, "spec.containers[*].startupProbe.tcpSocket", TCP),
    row(Pod, "spec.containers[*].startupProbe.grpc", GRPC),
    row(Pod, "spec.containers[*].livenessProbe", PROBES),
    row(Pod, "spec.containers[*].livenessProbe.exec", EXEC),
    row(Pod, "spec.containers[*].livenessProbe.httpGet", HTTP),
    row(Pod, "spec.containers[*].livenessProbe.tcpSocket", TCP),
    row(Pod, "spec.containers[*].livenessProbe.grpc", GRPC),
    row(Pod, "spec.containers[*].readinessProbe", PROBES),
    row(Pod, "spec.containers[*].readinessProbe.exec", EXEC),
    row(Pod, "spec.containers[*].readinessProbe.httpGet", HTTP),
    row(Pod, "spec.containers[*].readinessProbe.tcpSocket", TCP),
    row(Pod, "spec.containers[*].readinessProbe.grpc", GRPC),
    row(
        Pod,
        "spec.containers[*].lifecycle.stopSignal",
        &["a_container_is_stopped_by_its_own_signal", "a_stop_signal_needs_its_name_and_the_pods_system"],
    ),
    row(Pod, "spec.containers[*].lifecycle.postStart", &["hooks_run_within_the_grace_period"]),
    row(Pod, "spec.containers[*].lifecycle.postStart.httpGet", HOOKS_BY_HTTP),
    row(Pod, "spec.containers[*].lifecycle.preStop", &["hooks_run_within_the_grace_period"]),
    row(Pod, "spec.containers[*].lifecycle.preStop.httpGet", HOOKS_BY_HTTP),
    row(
        Pod,
        "spec.initContainers[*].restartPolicy",
        &["a_sidecar_starts_before_the_containers_and_ends_after_them"],
    ),
    row(Pod, "spec.volumes[*].name", CONTAINER),
    row(Pod, "spec.volumes[*].configMap", FILES),
    row(Pod, "spec.volumes[*].secret", FILES),
    row(Pod, "spec.volumes[*].downwardAPI", FILES),
    row(Pod, "spec.volumes[*].projected", FILES),
    row(Pod, "spec.volumes[*].emptyDir.medium", &["an_empty_dir_in_memory_is_mounted_once_and_unmounted"]),
    row(
        Pod,
        "spec.volumes[*].emptyDir.sizeLimit",
        &["a_pod_over_the_limit_of_its_emptydir_is_evicted_and_its_space_is_freed"],
    ),
    row(Pod, "spec.volumes[*].hostPath", &["a_host_path_must_match_its_type"]),
    row(
        Pod,
        "spec.volumes[*].persistentVolumeClaim",
        &["the_driver_gets_what_a_volume_says", "parts_of_volumes_are_mounted_and_nothing_of_them_is_left"],
    ),
    row(
        Pod,
        "spec.volumes[*].ephemeral",
        &["a_pods_own_claim_is_made_and_deleted_with_it", "a_claim_is_made_once_and_only_for_its_pod"],
    ),
    row(
        Pod,
        "spec.volumes[*].ephemeral.volumeClaimTemplate.spec",
        &[
            "a_pods_own_claim_is_made_and_deleted_with_it",
            "a_volume_requested_by_name_must_satisfy_the_claim",
        ],
    ),
    row(Claim, "apiVersion", KINDS),
    row(Claim, "kind", KINDS),
    row(Claim, "metadata.name", NAMES),
    row(Claim, "metadata.namespace", NAMES),
    row(Claim, "metadata.labels", DOCUMENT),
    row(Claim, "metadata.annotations", DOCUMENT),
    row(Claim, "spec.accessModes", BINDING),
    row(Claim, "spec.resources", PROVISIONING),
    row(Claim, "spec.storageClassName", BINDING),
    row(Claim, "spec.volumeName", BINDING),
    row(Claim, "spec.volumeMode", BINDING),
    row(Claim, "spec.selector", &["a_selector_chooses_among_volumes_and_is_never_provisioned"]),
    row(Claim, "spec.dataSource", SOURCE),
    row(Claim, "spec.dataSourceRef", SOURCE),
    row(Volume, "apiVersion", KINDS),
    row(Volume, "kind", KINDS),
    row(Volume, "metadata.name", NAMES),
    row(Volume, "metadata.labels", DOCUMENT),
    row(Volume, "metadata.annotations", DOCUMENT),
    row(Volume, "spec.capacity", BINDING),
    row(Volume, "spec.accessModes", BINDING),
    row(
        Volume,
        "spec.persistentVolumeReclaimPolicy",
        &["a_volume_that_was_made_for_a_claim_goes_with_it_unless_it_is_retained"],
    ),
    row(Volume, "spec.storageClassName", BINDING),
    row(Volume, "spec.volumeMode", BINDING),
    row(Volume, "spec.claimRef", &["a_claim_gets_its_reserved_volume_or_the_smallest_sufficient_one"]),
    row(Volume, "spec.mountOptions", &["the_driver_gets_what_a_volume_says"]),
    row(Volume, "spec.csi", &["the_driver_gets_what_a_volume_says"]),
    row(Volume, "spec.csi.controllerExpandSecretRef", SECRETS),
    row(Volume, "spec.csi.nodeExpandSecretRef", SECRETS),
    row(Volume, "spec.csi.nodePublishSecretRef", SECRETS),
    row(Volume, "spec.csi.nodeStageSecretRef", SECRETS),
    row(Class, "apiVersion", KINDS),
    row(Class, "kind", KINDS),
    row(Class, "metadata.name", NAMES),
    row(Class, "metadata.labels", DOCUMENT),
    row(Class, "metadata.annotations", &["a_claim_that_names_no_class_gets_the_default"]),
    row(Class, "provisioner", PROVISIONING),
    row(Class, "parameters", PROVISIONING),
    row(Class, "reclaimPolicy", PROVISIONING),
    row(Class, "mountOptions", PROVISIONING),
    row(
        Class,
        "allowVolumeExpansion",
        &["a_claim_grows_while_its_pod_runs", "a_volume_that_no_pod_has_grows_when_it_is_mounted"],
    ),
    row(Class, "volumeBindingMode", &["a_class_provisions_at_once_or_for_its_first_consumer"]),
    row(Driver, "apiVersion", KINDS),
    row(Driver, "kind", KINDS),
    row(Driver, "metadata.name", NAMES),
    row(Driver, "metadata.labels", DOCUMENT),
    row(Driver, "metadata.annotations", DOCUMENT),
    row(
        Driver,
        "spec.attachRequired",
        &["a_driver_that_waits_for_attachments_is_not_called_until_its_object_says_otherwise"],
    ),
    row(Driver, "spec.fsGroupPolicy", &["with_requires_republish_a_pod_recovers_from_the_end_of_its_daemon"]),
    row(Driver, "spec.podInfoOnMount", &["the_driver_gets_what_a_volume_says"]),
    row(
        Driver,
        "spec.requiresRepublish",
        &["with_requires_republish_a_pod_recovers_from_the_end_of_its_daemon"],
    ),
    row(ConfigMap, "apiVersion", KINDS),
    row(ConfigMap, "kind", KINDS),
    row(ConfigMap, "metadata.name", NAMES),
    row(ConfigMap, "metadata.namespace", NAMES),
    row(ConfigMap, "metadata.labels", DOCUMENT),
    row(ConfigMap, "metadata.annotations", DOCUMENT),
    row(ConfigMap, "data", FILES),
    row(
        ConfigMap,
        "binaryData",
        &["keys_become_files_with_their_modes", "config_maps_and_secrets_keep_kubernetes_rules"],
    ),
    row(ConfigMap, "immutable", &["what_is_marked_immutable_stays_as_it_is"]),
    row(Secret, "apiVersion", KINDS),
    row(Secret, "kind", KINDS),
    row(Secret, "metadata.name", NAMES),
    row(Secret, "metadata.namespace", NAMES),
    row(Secret, "metadata.labels", DOCUMENT),
    row(Secret, "metadata.annotations", DOCUMENT),
    row(Secret, "data", &["string_data_wins_over_data_and_is_not_kept"]),
    row(Secret, "stringData", &["string_data_wins_over_data_and_is_not_kept"]),
    row(Secret, "type", REGISTRIES),
    row(Secret, "immutable", &["what_is_marked_immutable_stays_as_it_is"]),
    row(Snapshot, "apiVersion", KINDS),
    row(Snapshot, "kind", KINDS),
    row(Snapshot, "metadata.name", NAMES),
    row(Snapshot, "metadata.namespace", NAMES),
    row(Snapshot, "metadata.labels", DOCUMENT),
    row(Snapshot, "metadata.annotations", DOCUMENT),
    row(Snapshot, "spec.source.persistentVolumeClaimName", SNAPSHOTS),
    row(Snapshot, "spec.source.volumeSnapshotContentName", HANDLES),
    row(Snapshot, "spec.volumeSnapshotClassName", SNAPSHOTS),
    row(SnapshotClass, "apiVersion", KINDS),
    row(SnapshotClass, "kind", KINDS),
    row(SnapshotClass, "metadata.name", NAMES),
    row(SnapshotClass, "metadata.labels", DOCUMENT),
    row(SnapshotClass, "metadata.annotations", SNAPSHOTS),
    row(SnapshotClass, "driver", SNAPSHOTS),
    row(SnapshotClass, "deletionPolicy", SNAPSHOTS),
    row(SnapshotClass, "parameters", SNAPSHOTS),
    row(Content, "apiVersion", KINDS),
    row(Content, "kind", KINDS),
    row(Content, "metadata.name", NAMES),
    row(Content, "metadata.labels", DOCUMENT),
    row(Content, "metadata.annotations", DOCUMENT),
    row(Content, "spec.deletionPolicy", HANDLES),
    row(Content, "spec.driver", HANDLES),
    row(Content, "spec.source.snapshotHandle", HANDLES),
    row(Content, "spec.source.volumeHandle", SNAPSHOTS),
    row(Content, "spec.volumeSnapshotClassName", SNAPSHOTS),
    row(
        Content,
        "spec.volumeSnapshotRef",
        &[
            "a_retained_snapshot_comes_back_by_its_handle",
            "a_content_that_is_applied_again_keeps_its_snapshot_and_the_kubelets_annotations",
        ],
    ),
];
