//! Other uses of the binaries that link this crate: a shim, an unpacker and a resolver of names are the same executable,
//! started under other names.

use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;
use std::sync::OnceLock;

use linux::rootfs;

use crate::error::chain;
use crate::{images, registry, shim};

/// `argv[0]` of a shim; `argv[1]` is the sandbox's directory.
pub(crate) const SHIM_NAME: &str = "hawser-shim";

/// `argv[0]` of the process that unpacks one layer. `argv[1]` is its job, `argv[2]` its parent,
/// `argv[3]` its control group, if it has one.
pub(crate) const UNPACKER_NAME: &str = "hawser-unpack";

/// `argv[0]` of the process that finds the addresses of the host in `argv[1]`.
pub(crate) const RESOLVER_NAME: &str = "hawser-resolve";

const OWN_PROGRAM: &str = "/proc/self/exe";

/// Must be the first statement of `main` in every binary that starts a runtime: if this process was
/// started as one of them, does that work and returns its exit code.
pub fn run_if_asked() -> Option<ExitCode> {
    let mut args = std::env::args_os();
    let name = args.next()?;
    if name == UNPACKER_NAME {
        let (job, parent) = (args.next()?.into_string().ok()?, args.next()?.into_string().ok()?);
        return Some(printed(images::run_unpacker(&job, &parent, args.next().as_deref().map(Path::new))));
    }
    if name == RESOLVER_NAME {
        return Some(printed(registry::run_resolver(&args.next()?.into_string().ok()?)));
    }
    if name != SHIM_NAME {
        return None;
    }
    let dir = args.next()?;
    match shim::run(Path::new(&dir)) {
        Ok(()) => Some(ExitCode::SUCCESS),
        Err(error) => {
            // stderr is shim.log in the sandbox's directory.
            let _no_reader = writeln!(std::io::stderr(), "{}", trace::escaped(&chain(&error)));
            Some(ExitCode::FAILURE)
        }
    }
}

#[expect(clippy::print_stdout, reason = "the answer to the process that asked")]
fn printed<E: std::error::Error>(answer: Result<String, E>) -> ExitCode {
    match answer {
        Ok(answer) => {
            println!("{answer}");
            ExitCode::SUCCESS
        }
        Err(problem) => {
            let _no_reader = writeln!(std::io::stderr(), "{}", chain(&problem));
            ExitCode::FAILURE
        }
    }
}

/// This program, through a read-only mount that no path leads to. A container that obtains the file
/// its shim was started from cannot write to it (an image's script may name /proc/self/exe as its
/// interpreter). All shims share the program's pages (docs/decisions/0037).
pub(crate) fn own_program() -> linux::Result<String> {
    // Never closed: releasing a mount waits for RCU.
    static MOUNT: OnceLock<OwnedFd> = OnceLock::new();
    let mount = match MOUNT.get() {
        Some(mount) => mount,
        None => {
            let read_only = rootfs::Attributes { read_only: true, ..rootfs::Attributes::default() };
            let tree = rootfs::clone_tree(Path::new(OWN_PROGRAM), rootfs::MountsBelow::Without)?;
            rootfs::set_attributes(&tree, read_only)?;
            MOUNT.get_or_init(|| tree)
        }
    };
    Ok(format!("/proc/self/fd/{}", mount.as_raw_fd()))
}
