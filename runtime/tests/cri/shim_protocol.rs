//! The socket of a running pod's shim, with a client other than the runtime: descriptors reach the
//! container, or are closed.

use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, IoSlice, PipeReader, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde_json::{Value, json};
use tests::cri::{Host, IMAGE, container};

struct Shim(BufReader<UnixStream>);

impl Shim {
    fn connect(host: &Host, pod: &str) -> Self {
        // Through its descriptor, since a socket's path has at most 107 bytes.
        let dir = File::open(host.path("root/sandboxes").join(pod)).unwrap();
        let path = format!("/proc/self/fd/{}/shim.sock", dir.as_raw_fd());
        Self(BufReader::new(UnixStream::connect(path).unwrap()))
    }

    /// Nothing comes, and the connection stays.
    fn is_silent_for(&mut self, time: Duration) -> bool {
        self.0.get_ref().set_read_timeout(Some(time)).unwrap();
        let is_silent = self.0.fill_buf().is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
        self.0.get_ref().set_read_timeout(None).unwrap();
        is_silent
    }

    /// Sends the reading end of a pipe with the request, and returns the shim's answer to it.
    fn call(&mut self, request: &Value, pipe: PipeReader) -> Value {
        let descriptors = [pipe.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        let line = format!("{request}\n");
        let sent = rustix::net::sendmsg(
            self.0.get_ref(),
            &[IoSlice::new(line.as_bytes())],
            &mut control,
            SendFlags::empty(),
        );
        assert_eq!(sent.unwrap(), line.len());
        let mut answer = String::new();
        self.0.read_line(&mut answer).unwrap();
        serde_json::from_str::<Value>(&answer).unwrap()["answer"].take()
    }
}

fn layers(host: &Host) -> Vec<PathBuf> {
    std::fs::read_dir(host.path("root/images/layers")).unwrap().map(|entry| entry.unwrap().path()).collect()
}

#[tokio::test]
async fn a_pipe_that_comes_with_a_start_is_the_containers_stdin() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let id = cri.create(&pod, container("c", &["/demo-app", "cat", "/proc/self/fd/0"])).await.unwrap();
    let dir = host.path("root/sandboxes").join(&pod).join("containers").join(&id);
    let overlay = json!({"lower": layers(&host), "upper": dir.join("upper"), "work": dir.join("work")});
    let request = json!({
        "id": 7, "descriptors": 1, "call": "start", "container": id,
        "log": host.path("logs/c.log"), "overlay": overlay,
    });
    let (stdin, mut writer) = std::io::pipe().unwrap();
    let answer = Shim::connect(&host, &pod).call(&request, stdin);
    assert_eq!(answer["answer"], "started", "{answer}");
    writer.write_all(b"through the pipe\n").unwrap();
    drop(writer);
    assert_eq!(cri.ended(&id).await.exit_code, 0);
    assert_eq!(host.container_log("c"), ["stdout F through the pipe"]);
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

/// Ticks of the processor that a process has used (proc_pid_stat(5), fields 14 and 15).
fn ticks(pid: i32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[tokio::test]
async fn a_shim_without_room_for_a_client_waits_for_it() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let shim = host.shims()[0];
    let pid = rustix::process::Pid::from_raw(shim);
    let limit = |current: Option<u64>| {
        let kind = rustix::process::Resource::Nofile;
        let maximum = rustix::process::getrlimit(kind).maximum;
        rustix::process::prlimit(pid, kind, rustix::process::Rlimit { current, maximum }).unwrap()
    };
    let is_free = |fd: &u64| !std::fs::exists(format!("/proc/{shim}/fd/{fd}")).unwrap();
    let before = limit(Some((0..).find(is_free).unwrap()));
    let mut client = Shim::connect(&host, &pod);
    let begun = ticks(shim);
    assert!(client.is_silent_for(Duration::from_secs(1)), "it has room for no client");
    let used = ticks(shim) - begun;
    // Of a hundred.
    assert!(used < 10, "it used the processor for {used} ticks");
    let log = host.path("root/sandboxes").join(&pod).join("shim.log");
    let log = std::fs::read_to_string(log).unwrap();
    assert_eq!(log.matches("accept a client: Too many open files").count(), 1, "{log}");
    limit(before.current);
    let (pipe, _writer) = std::io::pipe().unwrap();
    let answer = client.call(&json!({"id": 7, "descriptors": 1, "call": "list"}), pipe);
    assert_eq!(answer["answer"], "refused", "{answer}");
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

#[tokio::test]
async fn a_descriptor_that_comes_with_a_call_that_takes_none_is_closed() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let mut shim = Shim::connect(&host, &pod);
    for call in ["list", "shutdown"] {
        let (pipe, writer) = std::io::pipe().unwrap();
        let answer = shim.call(&json!({"id": 7, "descriptors": 1, "call": call}), pipe);
        assert_eq!(answer, json!({"answer": "refused", "problem": "descriptors: the call takes at most 0"}));
        let mut waiting = [PollFd::new(writer.as_fd(), PollFlags::empty())];
        poll(&mut waiting, PollTimeout::ZERO).unwrap();
        assert_eq!(waiting[0].revents(), Some(PollFlags::POLLERR), "no reader is left");
    }
    cri.remove_pod(&pod).await;
    host.assert_clean();
}
