//! The profile RuntimeDefault on the kernel: one program of a few instructions
//! for each system call, whose exit code is the call's errno.

#![cfg(target_arch = "x86_64")]
#![expect(unsafe_code, reason = "SO_ATTACH_FILTER has no safe wrapper")]

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};
use proto::cri::security_profile::ProfileType;
use proto::cri::{Capability, ContainerConfig, Int64Value, SecurityProfile};
use tests::cri::{Host, IMAGE, container, demo_program, image_spec, layer, write_layout};

use crate::containers::{field, with_context};

const EPERM: i32 = 1;
const ENOSYS: i32 = 38;

/// Name, number, first three arguments, errno in a default container.
const REFUSED: &[(&str, u32, u64, u32, u32, i32)] = &[
    ("unshare", 272, 0, 0, 0, EPERM),
    ("setns", 308, 0, 0, 0, EPERM),
    ("mount", 165, 0, 0, 0, EPERM),
    ("umount2", 166, 0, 0, 0, EPERM),
    ("open_tree", 428, 0, 0, 0, EPERM),
    ("bpf", 321, 0, 0, 0, EPERM),
    ("perf_event_open", 298, 0, 0, 0, EPERM),
    ("keyctl", 250, 0, 0, 0, EPERM),
    ("add_key", 248, 0, 0, 0, EPERM),
    ("request_key", 249, 0, 0, 0, EPERM),
    ("userfaultfd", 323, 0, 0, 0, EPERM),
    ("io_uring_setup", 425, 0, 0, 0, EPERM),
    ("open_by_handle_at", 304, 0, 0, 0, EPERM),
    ("init_module", 175, 0, 0, 0, EPERM),
    ("kexec_load", 246, 0, 0, 0, EPERM),
    ("syslog", 103, 0, 0, 0, EPERM),
    ("quotactl", 179, 0, 0, 0, EPERM),
    ("clone-newuser", 56, 0x1000_0000, 0, 0, EPERM),
    ("socket-vsock", 41, 40, 1, 0, EPERM),
    ("socket-vsock-high", 41, 0x1_0000_0028, 1, 0, EPERM),
    ("personality-no-randomize", 135, 0x4_0000, 0, 0, EPERM),
    // ENOSYS makes C libraries fall back to older calls.
    ("clone3", 435, 0, 0, 0, ENOSYS),
    ("unknown", 1000, 0, 0, 0, ENOSYS),
];
const ALLOWED: &[(&str, u32, u64, u32, u32)] = &[
    ("sync", 162, 0, 0, 0),
    ("socket-unix", 41, 1, 1, 0),
    ("socket-inet6", 41, 10, 1, 0),
    ("personality-query", 135, 0xffff_ffff, 0, 0),
    ("fchmodat2", 452, 0, 0, 0),
    ("mseal", 462, 0, 0, 0),
];
/// Allowed with CAP_SYS_ADMIN.
const FOR_ADMINS: &[&str] = &["unshare", "setns", "mount", "umount2", "open_tree", "bpf", "quotactl"];

/// An executable that makes one system call and exits with its errno.
pub(crate) fn probe(number: u32, first: u64, second: u32, third: u32) -> Vec<u8> {
    const BASE: u64 = 0x40_0000;
    const HEADERS: u64 = 64 + 56;
    let mut code = vec![0x48, 0xbf]; // mov rdi, first
    code.extend(first.to_le_bytes());
    code.push(0xbe); // mov esi, second
    code.extend(second.to_le_bytes());
    code.push(0xba); // mov edx, third
    code.extend(third.to_le_bytes());
    code.push(0xb8); // mov eax, number
    code.extend(number.to_le_bytes());
    code.extend([0x0f, 0x05, 0xf7, 0xd8, 0x89, 0xc7]); // syscall; neg eax; mov edi, eax
    code.extend([0xb8, 0x3c, 0, 0, 0, 0x0f, 0x05]); // exit
    let mut elf = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    elf.extend([2, 0, 62, 0, 1, 0, 0, 0]); // EXEC, x86-64, version 1
    elf.extend((BASE + HEADERS).to_le_bytes()); // entry
    elf.extend(64_u64.to_le_bytes()); // program headers
    elf.extend(0_u64.to_le_bytes());
    elf.extend([0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    elf.extend([1, 0, 0, 0, 5, 0, 0, 0]); // LOAD, read and execute
    let size = HEADERS + code.len() as u64;
    for field in [0, BASE, BASE, size, size, 0x1000] {
        elf.extend(field.to_le_bytes());
    }
    elf.extend(code);
    elf
}

fn filtered(config: ContainerConfig) -> ContainerConfig {
    let profile = SecurityProfile { profile_type: ProfileType::RuntimeDefault.into(), ..Default::default() };
    with_context(config, |c| c.seccomp = Some(profile))
}

#[tokio::test]
async fn runtime_default_refuses_what_containers_need_not_and_lets_programs_work() {
    let mut host = Host::new();
    let mut cri = host.start().await;
    let mut files: Vec<(&str, u32, Vec<u8>)> = vec![("demo-app", 0o755, demo_program())];
    for (name, number, first, second, third, _) in REFUSED {
        files.push((name, 0o755, probe(*number, *first, *second, *third)));
    }
    for (name, number, first, second, third) in ALLOWED {
        files.push((name, 0o755, probe(*number, *first, *second, *third)));
    }
    let files: Vec<(&str, u32, &[u8])> =
        files.iter().map(|(name, mode, text)| (*name, *mode, &**text)).collect();
    write_layout(&host.path("images/probes"), "probes:1", &layer(&files));
    cri.pull("probes:1").await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let config = |kind: &str, program: &str| ContainerConfig {
        image: Some(image_spec("probes:1")),
        ..container(&format!("{kind}-{program}"), &[&format!("/{program}")])
    };
    for (name, .., errno) in REFUSED {
        assert_eq!(cri.run(&pod, filtered(config("default", name))).await.exit_code, *errno, "{name}");
    }
    for (name, ..) in ALLOWED {
        let code = cri.run(&pod, filtered(config("default", name))).await.exit_code;
        assert_ne!(code, EPERM, "{name}");
        if code == ENOSYS {
            let unfiltered = cri.run(&pod, config("unfiltered", name)).await.exit_code;
            assert_eq!(unfiltered, ENOSYS, "{name}: this kernel has the call");
        }
    }
    for name in FOR_ADMINS {
        let admin = with_context(filtered(config("admin", name)), |c| {
            c.capabilities =
                Some(Capability { add_capabilities: vec!["SYS_ADMIN".into()], ..Default::default() });
        });
        assert_ne!(cri.run(&pod, admin).await.exit_code, EPERM, "{name} with CAP_SYS_ADMIN");
    }
    // The filter refuses them, not the kernel.
    for name in ["unshare", "keyctl", "personality-no-randomize"] {
        assert_ne!(cri.run(&pod, config("unconfined", name)).await.exit_code, EPERM, "{name} unconfined");
    }
    let normal = filtered(ContainerConfig {
        image: Some(image_spec("probes:1")),
        ..container("normal", &["/demo-app", "print", "works"])
    });
    assert_eq!(cri.run(&pod, normal).await.exit_code, 0);
    assert_eq!(host.container_log("normal"), ["stdout F works"]);
    cri.remove_pod(&pod).await;
    host.assert_clean();
}

/// The memory that the kernel has for filters of processes without CAP_BPF: one figure for the
/// whole machine, which only its first network namespace shows. Put back at the end.
struct MemoryForFilters {
    sysctl: File,
    limit: String,
}

impl MemoryForFilters {
    /// To be called before [`Host::new`] leaves the namespace.
    fn open() -> Self {
        let mut sysctl =
            File::options().read(true).write(true).open("/proc/sys/net/core/bpf_jit_limit").unwrap();
        let mut limit = String::new();
        sysctl.read_to_string(&mut limit).unwrap();
        Self { sysctl, limit }
    }

    /// Nothing more than what there is already, and of that nothing is free as long as the sockets
    /// are open.
    fn take_all(&self) -> Vec<OwnedFd> {
        self.set("1");
        let mut sockets = Vec::new();
        std::thread::scope(|scope| scope.spawn(|| fill_with_filters(&mut sockets)).join()).unwrap();
        sockets
    }

    fn give_back(&self) {
        self.set(&self.limit);
    }

    fn set(&self, limit: &str) {
        self.sysctl.write_all_at(limit.as_bytes(), 0).unwrap();
    }
}

/// Attaches filters to sockets until none fits that is a tenth of a container's, as a process
/// without CAP_BPF. The calling thread loses its capabilities.
fn fill_with_filters(sockets: &mut Vec<OwnedFd>) {
    linux::process::set_capabilities(Default::default()).unwrap();
    let mut length = 4096;
    while length >= 128 {
        let socket = match socket(AddressFamily::Unix, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None) {
            // A kernel that interprets what it does not compile refuses no filter.
            Err(Errno::EMFILE) => return sockets.clear(),
            made => made.unwrap(),
        };
        match attach_filter(&socket, length) {
            Ok(()) => sockets.push(socket),
            Err(_no_memory) => length /= 2,
        }
    }
}

/// `length` instructions, of which the last one returns (socket(7), SO_ATTACH_FILTER).
fn attach_filter(socket: &OwnedFd, length: u16) -> std::io::Result<()> {
    const DIVIDE: libc::sock_filter = libc::sock_filter { code: 0x34, jt: 0, jf: 0, k: 3 };
    const RETURN: libc::sock_filter = libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: 0 };
    let mut program = vec![DIVIDE; usize::from(length)];
    program[usize::from(length) - 1] = RETURN;
    let filter = libc::sock_fprog { len: length, filter: program.as_mut_ptr() };
    let size = libc::socklen_t::try_from(size_of_val(&filter)).unwrap();
    // SAFETY: `filter` is a struct sock_fprog and points to `length` instructions; the kernel
    // copies them.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            std::ptr::from_ref(&filter).cast(),
            size,
        )
    };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

impl Drop for MemoryForFilters {
    fn drop(&mut self) {
        self.give_back();
    }
}

#[tokio::test]
async fn filters_of_other_processes_keep_no_container_from_its_own() {
    let memory = MemoryForFilters::open();
    let mut host = Host::new();
    let mut cri = host.start().await;
    cri.pull(IMAGE).await.unwrap();
    let pod = cri.run_pod(&host.pod("p")).await.unwrap();
    let restricted = |name: &str, uid: i64| {
        with_context(filtered(container(name, &["/demo-app", "status"])), |c| {
            c.no_new_privs = true;
            c.run_as_user = Some(Int64Value { value: uid });
            c.capabilities = Some(Capability { drop_capabilities: vec!["ALL".into()], ..Default::default() });
        })
    };
    for (name, uid) in [("root", 0), ("user", 1000)] {
        let filters = memory.take_all();
        let ended = cri.run(&pod, restricted(name, uid)).await;
        memory.give_back();
        drop(filters);
        assert_eq!(ended.exit_code, 0, "{name}: {}", ended.message);
        let log = host.container_log(name);
        for set in ["CapPrm", "CapEff", "CapBnd"] {
            assert_eq!(field(&log, set), "0000000000000000", "{name}: {set}");
        }
        assert_eq!((field(&log, "NoNewPrivs"), field(&log, "Seccomp")), ("1".into(), "2".into()));
    }
    cri.remove_pod(&pod).await;
    host.assert_clean();
}
