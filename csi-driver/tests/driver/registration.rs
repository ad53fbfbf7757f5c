//! Registration as a Go kubelet does it: grpc-go makes the dialled path the
//! `:authority`, which no Rust client can send, so these tests write the frames.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use prost::Message;
use proto::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use tests::eventually;

use crate::scene::{Flags, PATIENCE, Scene};

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
        let stream = self.next_stream;
        self.next_stream += 2;
        let block = self.header_block(method, stream);
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
    fn header_block(&self, method: &str, stream: u32) -> Vec<u8> {
        let mut block = vec![0x83, 0x86];
        let literal = |block: &mut Vec<u8>, first: &[u8], value: &str| {
            block.extend(first);
            assert!(value.len() < 127, "one byte of length is enough here");
            block.push(u8::try_from(value.len()).unwrap());
            block.extend(value.as_bytes());
        };
        literal(&mut block, &[0x04], &format!("/pluginregistration.Registration/{method}"));
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
    let accepted = RegistrationStatus { plugin_registered: true, error: String::new() };
    let info = register(&scene.registration_socket(), &accepted);
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("CSIPlugin", "csi.hawser.dev"));
    assert_eq!(Path::new(&info.endpoint), scene.csi_socket());
    assert_eq!(info.supported_versions, ["1.0.0"]);
    eventually("it is logged", PATIENCE, || {
        anyhow::ensure!(scene.log().contains("registered with kubelet"), "{}", scene.log());
        Ok(())
    })
    .unwrap();
}

/// Why there is a listener of its own: the same request on the CSI socket is refused by h2.
#[test]
fn the_same_request_is_refused_where_nothing_rewrites_it() {
    let scene = Scene::start(Flags::process());
    let mut client = GoClient::dial(&scene.csi_socket());
    let refused = client.call::<PluginInfo>("GetInfo", &InfoRequest {}).unwrap_err();
    assert_eq!(refused, RST_STREAM);
}

#[test]
fn a_refused_registration_is_offered_again_on_a_new_socket() {
    use std::os::unix::fs::MetadataExt;
    let scene = Scene::start(Flags::process());
    let path = scene.registration_socket();
    let born = || std::fs::metadata(&path).map(|found| (found.ino(), found.ctime_nsec())).ok();
    let first = born();
    let refused = RegistrationStatus { plugin_registered: false, error: "no such luck".into() };
    register(&path, &refused);
    eventually("a new socket", PATIENCE, || {
        anyhow::ensure!(born().is_some() && born() != first, "{:?}", born());
        Ok(())
    })
    .unwrap();
    register(&path, &RegistrationStatus { plugin_registered: true, error: String::new() });
    assert!(scene.log().contains("no such luck"));
}

#[test]
fn garbage_on_the_registration_socket_harms_nobody() {
    let scene = Scene::start(Flags::process());
    let path = scene.registration_socket();
    let large_frame = [PREFACE, &[0xff, 0xff, 0xff, 1, 0, 0, 0, 0, 1]].concat();
    let wrong_block = [PREFACE, &[0, 0, 1, 1, 4, 0, 0, 0, 1, 0x80]].concat();
    for bytes in [b"GET / HTTP/1.1\r\n\r\n".to_vec(), vec![0; 4096], large_frame, wrong_block] {
        let mut socket = UnixStream::connect(&path).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        socket.write_all(&bytes).unwrap();
        // Closed by the driver: the read ends, with or without a reset.
        let _reset_or_not = socket.read_to_end(&mut Vec::new());
    }
    register(&path, &RegistrationStatus { plugin_registered: true, error: String::new() });
}
