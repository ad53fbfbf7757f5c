//! The systemd units of docs/KUBERNETES.md.

const PAGE: &str = include_str!("../../docs/KUBERNETES.md");

/// systemd gives up a service that has failed five times within ten seconds, also with `Restart=always`
/// (systemd.unit(5), `StartLimitIntervalSec=`).
#[test]
fn systemd_starts_a_service_that_is_to_run_always_without_limit() {
    let units = || PAGE.split("```ini\n").skip(1).filter_map(|rest| rest.split("```").next());
    let restarted: Vec<&str> = units().filter(|unit| unit.contains("\nRestart=always\n")).collect();
    assert_eq!(restarted.len(), 2, "the driver's and the keeper's");
    for unit in restarted {
        assert!(unit.contains("\nStartLimitIntervalSec=0\n"), "{unit}");
    }
}
