//! Registration as a Go kubelet does it: grpc-go makes the dialled path the
//! `:authority`, which no Rust client can send, so these tests write the frames.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use prost::Message;
use proto::csi::{
    CreateVolumeResponse, DeleteVolumeRequest, DeleteVolumeResponse, GetPluginInfoRequest,
    GetPluginInfoResponse, NodeGetInfoRequest, NodeGetInfoResponse,
};
use proto::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use tests::csi::scene::{Flags, GI, NODE, Scene, TIMEOUT, create_request};
use tests::eventually;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const HEADERS: u8 = 1;
const DATA: u8 = 0;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// One connection that speaks just enough HTTP/2 to make unary calls.
struct GoClient {
    socket: UnixStream,
    authority: String,
    next_stream: u32,
}

impl GoClient {
    fn dial(path: &Path) -> Self {
        let mut socket = UnixStream::connect(path).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        socket.write_all(PREFACE).unwrap();
        // grpc-go: the target's path, escaped, is the authority.
        let authority = path.to_str().unwrap().replace('/', "%2F");
        let mut client = Self { socket, authority, next_stream: 1 };
        client.send(SETTINGS, 0, 0, &[]);
        client
    }

    fn send(&mut self, frame_type: u8, flags: u8, stream: u32, payload: &[u8]) {
        let mut frame = u32::try_from(payload.len()).unwrap().to_be_bytes()[1..].to_vec();
        frame.extend([frame_type, flags]);
        frame.extend(stream.to_be_bytes());
        frame.extend(payload);
        self.socket.write_all(&frame).unwrap();
    }

    /// Frame type, stream and payload; `None` at the end of the connection.
    fn receive(&mut self) -> Option<(u8, u32, Vec<u8>)> {
        let mut header = [0; 9];
        self.socket.read_exact(&mut header).ok()?;
        let length = u32::from_be_bytes([0, header[0], header[1], header[2]]);
        let mut payload = vec![0; usize::try_from(length).unwrap()];
        self.socket.read_exact(&mut payload).ok()?;
        Some((header[3], u32::from_be_bytes(header[5..9].try_into().unwrap()), payload))
    }

    /// The reply's message, or the frame type that ended the call. A GOAWAY
    /// does not end the calls before it.
    fn call<R: Message + Default>(&mut self, method: &str, request: &impl Message) -> Result<R, u8> {
        self.call_of("pluginregistration.Registration", method, request)
    }

    fn call_of<R: Message + Default>(
        &mut self,
        service: &str,
        method: &str,
        request: &impl Message,
    ) -> Result<R, u8> {
        let stream = self.next_stream;
        self.next_stream += 2;
        let block = self.header_block(&format!("/{service}/{method}"), stream);
        // In two pieces with padding, as any client may.
        let (head, tail) = block.split_at(block.len() / 2);
        let padded = [&[4][..], head, &[0; 4]].concat();
        self.send(HEADERS, 8, stream, &padded);
        self.send(9, END_HEADERS, stream, tail);
        let body = request.encode_to_vec();
        let mut message = vec![0];
        message.extend(u32::try_from(body.len()).unwrap().to_be_bytes());
        message.extend(body);
        self.send(DATA, END_STREAM, stream, &message);
        let mut reply = Vec::new();
        loop {
            match self.receive() {
                Some((DATA, s, payload)) if s == stream => reply.extend(payload),
                Some((HEADERS, s, _)) if s == stream && !reply.is_empty() => break,
                Some((RST_STREAM, _, _)) => return Err(RST_STREAM),
                Some(_) => {}
                None => return Err(0xff),
            }
        }
        Ok(R::decode(&reply[5..]).unwrap())
    }

    /// The first request puts its authority into the dynamic table, later ones name
    /// it there: what grpc-go does.
    fn header_block(&self, path: &str, stream: u32) -> Vec<u8> {
        let mut block = vec![0x83, 0x86];
        let literal = |block: &mut Vec<u8>, first: &[u8], value: &str| {
            block.extend(first);
            assert!(value.len() < 127, "one byte of length is enough here");
            block.push(u8::try_from(value.len()).unwrap());
            block.extend(value.as_bytes());
        };
        literal(&mut block, &[0x04], path);
        if stream == 1 {
            literal(&mut block, &[0x41], &self.authority);
        } else {
            block.push(0xbe);
        }
        literal(&mut block, &[0x0f, 0x10], "application/grpc");
        literal(&mut block, b"\0\x02te", "trailers");
        block
    }
}

fn register(path: &Path, status: &RegistrationStatus) -> PluginInfo {
    let mut client = GoClient::dial(path);
    let info = client.call("GetInfo", &InfoRequest {}).unwrap();
    let _: RegistrationStatusResponse = client.call("NotifyRegistrationStatus", status).unwrap();
    info
}

#[test]
fn a_go_kubelet_registers_the_driver_on_one_connection() {
    let scene = Scene::start(Flags::process());
    let info = register(&scene.registration_socket(), &REGISTERED);
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("CSIPlugin", "csi.hawser.dev"));
    assert_eq!(Path::new(&info.endpoint), scene.csi_socket());
    assert_eq!(info.supported_versions, ["1.0.0"]);
    eventually("it is logged", TIMEOUT, || {
        anyhow::ensure!(scene.log().contains("registered with kubelet"), "{}", scene.log());
        Ok(())
    })
    .unwrap();
}

/// As gRPC's C core and Java address a unix socket, and old Go clients: by its path.
#[test]
fn the_csi_socket_serves_clients_that_name_its_path_as_their_authority() {
    let scene = Scene::start(Flags::process());
    let path = scene.csi_socket();
    let escaped = path.to_str().unwrap().replace('/', "%2F");
    for authority in [escaped, "%2Fk%2Fcsi.sock".to_owned(), "/k/csi.sock".to_owned(), String::new()] {
        let mut client = GoClient { authority, ..GoClient::dial(&path) };
        for _ in 0..2 {
            let info: GetPluginInfoResponse =
                client.call_of("csi.v1.Identity", "GetPluginInfo", &GetPluginInfoRequest {}).unwrap();
            assert_eq!(info.name, "csi.hawser.dev", "{}", client.authority);
        }
        let made: CreateVolumeResponse =
            client.call_of("csi.v1.Controller", "CreateVolume", &create_request("pvc-1")).unwrap();
        assert_eq!(made.volume.unwrap().capacity_bytes, GI);
    }
}

const REGISTERED: RegistrationStatus = RegistrationStatus { plugin_registered: true, error: String::new() };

fn refusal(reason: &str) -> RegistrationStatus {
    RegistrationStatus { plugin_registered: false, error: reason.into() }
}

/// Which socket it is, not merely that there is one.
fn born(path: &Path) -> Option<(u64, i64)> {
    fs::symlink_metadata(path).map(|found| (found.ino(), found.ctime_nsec())).ok()
}

/// Waits until another socket than `before` stands at `path` and answers.
#[track_caller]
fn wait_for_another(scene: &Scene, before: Option<(u64, i64)>) {
    let path = scene.registration_socket();
    eventually("a new socket", TIMEOUT, || {
        anyhow::ensure!(born(&path).is_some() && born(&path) != before, "{:?}\n{}", born(&path), scene.log());
        UnixStream::connect(&path)?;
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_refused_registration_is_offered_again_on_a_new_socket() {
    let scene = Scene::start(Flags::process());
    let path = scene.registration_socket();
    let first = born(&path);
    register(&path, &refusal("no such luck"));
    wait_for_another(&scene, first);
    register(&path, &REGISTERED);
    assert!(scene.log().contains("no such luck"));
}

#[test]
fn after_a_success_the_pauses_begin_anew() {
    let scene = Scene::start(Flags::process());
    let path = scene.registration_socket();
    let refused = || {
        let before = born(&path);
        register(&path, &refusal("not yet"));
        wait_for_another(&scene, before);
    };
    refused();
    refused();
    register(&path, &REGISTERED);
    refused();
    let log = scene.log();
    let pauses: Vec<&str> =
        log.lines().filter_map(|line| line.split(" again later seconds=").nth(1)).collect();
    assert_eq!(pauses, ["0.5", "1.0", "0.5"], "{log}");
}

#[test]
fn a_registration_socket_that_is_removed_comes_back() {
    let scene = Scene::start(Flags::process());
    let path = scene.registration_socket();
    let mut connected = GoClient::dial(&path);
    connected.call::<PluginInfo>("GetInfo", &InfoRequest {}).unwrap();
    for _ in 0..2 {
        let before = born(&path);
        fs::remove_file(&path).unwrap();
        wait_for_another(&scene, before);
        register(&path, &REGISTERED);
    }
    connected.call::<PluginInfo>("GetInfo", &InfoRequest {}).expect("who was connected stays so");
}

/// As a kubelet that begins anew may do, or whoever clears its directories.
#[test]
fn a_registry_that_is_made_anew_gets_its_socket() {
    let scene = Scene::start(Flags::process());
    let path = scene.registration_socket();
    let registry = path.parent().unwrap();
    let first = born(&path);
    fs::remove_dir_all(registry).unwrap();
    wait_for_another(&scene, first);
    register(&path, &REGISTERED);
    let second = born(&path);
    let moved = registry.with_file_name("moved");
    fs::rename(registry, &moved).unwrap();
    fs::create_dir(registry).unwrap();
    wait_for_another(&scene, second);
    register(&path, &REGISTERED);
    assert!(scene.log().contains("the socket was removed"));
}

#[test]
fn a_live_socket_in_the_place_of_ours_is_not_taken() {
    let scene = Scene::start(Flags::process());
    let path = scene.registration_socket();
    fs::remove_file(&path).unwrap();
    let stranger = UnixListener::bind(&path).unwrap();
    let theirs = born(&path);
    eventually("it is told", TIMEOUT, || {
        anyhow::ensure!(scene.log().contains("another process answers there"), "{}", scene.log());
        Ok(())
    })
    .unwrap();
    assert_eq!(born(&path), theirs);
    drop(stranger);
    wait_for_another(&scene, theirs);
    register(&path, &REGISTERED);
    scene.caller().create_named("pvc-1").expect("CSI went on through it all");
}

#[test]
fn with_a_shared_endpoint_the_registration_socket_serves_csi() {
    let Flags(mut flags) = Flags::process();
    flags.extend(["--registration-endpoint", "shared"].map(str::to_owned));
    let scene = Scene::start(Flags(flags));
    let path = scene.registration_socket();
    assert_eq!(register(&path, &REGISTERED).endpoint, "", "the socket that is asked");

    let mut client = GoClient::dial(&path);
    let info: GetPluginInfoResponse =
        client.call_of("csi.v1.Identity", "GetPluginInfo", &GetPluginInfoRequest {}).unwrap();
    assert_eq!(info.name, "csi.hawser.dev");
    let made: CreateVolumeResponse =
        client.call_of("csi.v1.Controller", "CreateVolume", &create_request("pvc-1")).unwrap();
    let volume_id = made.volume.unwrap().volume_id;
    // Side-cars find the same driver where they always do.
    assert_eq!(scene.caller().create_named("pvc-1").unwrap(), volume_id);
    // A call that is under way does not end with the socket it came by.
    let before = born(&path);
    fs::remove_file(&path).unwrap();
    wait_for_another(&scene, before);
    let request = DeleteVolumeRequest { volume_id, ..Default::default() };
    let _: DeleteVolumeResponse = client.call_of("csi.v1.Controller", "DeleteVolume", &request).unwrap();
    let info: NodeGetInfoResponse =
        GoClient::dial(&path).call_of("csi.v1.Node", "NodeGetInfo", &NodeGetInfoRequest {}).unwrap();
    assert_eq!(info.node_id, NODE);
    drop(client);
    scene.assert_nothing_left();
}

#[test]
fn garbage_on_a_socket_harms_nobody() {
    let scene = Scene::start(Flags::process());
    let large_frame = [PREFACE, &[0xff, 0xff, 0xff, 1, 0, 0, 0, 0, 1]].concat();
    let wrong_block = [PREFACE, &[0, 0, 1, 1, 4, 0, 0, 0, 1, 0x80]].concat();
    let garbage = [b"GET / HTTP/1.1\r\n\r\n".to_vec(), vec![0; 4096], large_frame, wrong_block];
    let paths = [scene.registration_socket(), scene.csi_socket()];
    for (path, bytes) in paths.iter().flat_map(|path| garbage.iter().map(move |bytes| (path, bytes))) {
        let mut socket = UnixStream::connect(path).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        socket.write_all(bytes).unwrap();
        // Closed by the driver: the read ends, with or without a reset.
        let _reset_or_not = socket.read_to_end(&mut Vec::new());
    }
    register(&paths[0], &REGISTERED);
    scene.caller().create_named("pvc-1").unwrap();
}
