//! A driver that serves the node alone.

use proto::csi::plugin_capability::{Service, Type, service};
use proto::csi::{ControllerGetCapabilitiesRequest, GetPluginCapabilitiesRequest};
use tests::csi::scene::{Flags, NODE, Scene};
use tonic::Code;

use crate::start::{command, refusal};

fn offers_a_controller(scene: &Scene) -> bool {
    let request = GetPluginCapabilitiesRequest {};
    let answer = scene.caller().identity(async |mut i| i.get_plugin_capabilities(request).await).unwrap();
    let controller = Service { r#type: service::Type::ControllerService.into() };
    answer.get_ref().capabilities.iter().any(|offered| offered.r#type == Some(Type::Service(controller)))
}

#[test]
fn a_driver_without_a_controller_serves_the_volumes_that_there_are() {
    let mut scene = Scene::start(Flags::process());
    let id = scene.caller().create_named("pvc-1").unwrap();
    assert!(offers_a_controller(&scene));

    scene.flags.0.extend(["--mode", "node"].map(str::to_owned));
    scene.restart_driver();
    assert!(!offers_a_controller(&scene));
    let caller = scene.caller();
    assert_eq!(caller.create_named("pvc-2").unwrap_err().code(), Code::Unimplemented);
    let asked = caller
        .controller(async |mut c| c.controller_get_capabilities(ControllerGetCapabilitiesRequest {}).await);
    assert_eq!(asked.unwrap_err().code(), Code::Unimplemented);
    caller.stage(&id).unwrap();
    caller.publish(&id, "pod").unwrap();
    caller.unpublish(&id, "pod").unwrap();
    caller.unstage(&id).unwrap();

    scene.flags = Flags::process();
    scene.restart_driver();
    scene.caller().delete(&id).unwrap();
    scene.assert_nothing_left();
}

#[test]
fn a_controller_apart_from_the_pools_node_is_refused_before_anything_is_made() {
    let mut scene = Scene::start(Flags::process());
    scene.kill_driver();
    std::fs::remove_dir_all(scene.sandbox.path("state")).unwrap();
    let mut flags = Flags::process().0;
    flags.extend(["--mode", "controller"].map(str::to_owned));
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    assert_eq!(
        refusal(command(&scene, &[], NODE, &flags)),
        "--mode \"controller\": only the node that has the pool can make its volumes: start that node's driver with --mode both"
    );
    assert!(!scene.sandbox.path("state").exists());
}
