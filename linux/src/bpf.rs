//! Device programs of cgroup v2: loading and attaching them by bpf(2).
//!
//! Invariant: a program is attached with BPF_F_ALLOW_MULTI, so the programs of the groups above
//! stay in force: an access needs the consent of all, as on cgroup v1. The kernel frees a program
//! with its group.

#![expect(unsafe_code, reason = "bpf(2) has no safe wrapper")]

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;

use crate::device_rules::Instruction;
use crate::{Error, Result};

// linux/bpf.h
const PROG_LOAD: libc::c_int = 5;
const PROG_ATTACH: libc::c_int = 8;
const PROG_TYPE_CGROUP_DEVICE: u32 = 15;
const CGROUP_DEVICE: u32 = 6;
const F_ALLOW_MULTI: u32 = 1 << 1;

/// The members of union bpf_attr for BPF_PROG_LOAD, up to the last one that is set here; the kernel
/// reads the following ones as zero.
#[repr(C)]
struct LoadAttr {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
    prog_ifindex: u32,
    expected_attach_type: u32,
}

/// The members for BPF_PROG_ATTACH.
#[repr(C)]
struct AttachAttr {
    target_fd: u32,
    attach_bpf_fd: u32,
    attach_type: u32,
    attach_flags: u32,
}

/// A device program in the kernel, not attached yet.
#[derive(Debug)]
pub struct DeviceProgram(OwnedFd);

impl DeviceProgram {
    pub fn load(instructions: &[Instruction]) -> Result<Self> {
        let count = u32::try_from(instructions.len()).unwrap_or(u32::MAX);
        let license = c"Apache-2.0";
        let mut prog_name = [0; 16];
        prog_name[..14].copy_from_slice(b"hawser_devices");
        let attr = LoadAttr {
            prog_type: PROG_TYPE_CGROUP_DEVICE,
            insn_cnt: count,
            insns: address(instructions.as_ptr()),
            license: address(license.as_ptr()),
            log_level: 0,
            log_size: 0,
            log_buf: 0,
            kern_version: 0,
            prog_flags: 0,
            prog_name,
            prog_ifindex: 0,
            expected_attach_type: CGROUP_DEVICE,
        };
        // SAFETY: `attr` is laid out as the kernel's union for BPF_PROG_LOAD and has
        // the size that is passed. Instructions and license live across the call;
        // the kernel copies both and verifies the instructions.
        let fd = unsafe { libc::syscall(libc::SYS_bpf, PROG_LOAD, &raw const attr, size_of::<LoadAttr>()) };
        let fd = Errno::result(fd)
            .map_err(|e| Error::new("load BPF device program", format!("of {count} instructions"), e))?;
        let fd = i32::try_from(fd).expect("a descriptor is an int");
        // SAFETY: bpf(2) returned this new descriptor to us alone.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Enforces it for the processes of the group `dir` and of the groups below.
    pub fn attach(&self, dir: &Path) -> Result<()> {
        const OP: &str = "attach BPF device program to cgroup";
        let group = File::open(dir).map_err(|e| Error::at(OP, dir, e))?;
        let attr = AttachAttr {
            target_fd: group.as_raw_fd().cast_unsigned(),
            attach_bpf_fd: self.0.as_raw_fd().cast_unsigned(),
            attach_type: CGROUP_DEVICE,
            attach_flags: F_ALLOW_MULTI,
        };
        // SAFETY: `attr` is laid out as the kernel's union for BPF_PROG_ATTACH and
        // has the size that is passed; both descriptors are open across the call.
        let done =
            unsafe { libc::syscall(libc::SYS_bpf, PROG_ATTACH, &raw const attr, size_of::<AttachAttr>()) };
        Errno::result(done).map(drop).map_err(|e| Error::at(OP, dir, e))
    }
}

fn address<T>(pointer: *const T) -> u64 {
    u64::try_from(pointer.expose_provenance()).expect("an address has 64 bits at most")
}
