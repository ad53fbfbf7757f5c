//! What a guest finds: a root file system with busybox, the kernel's modules,
//! our binaries at the paths that they were built to look at, and the programs
//! of this machine that tests compare with; and an initramfs that leads there.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ::tests::binaries::workspace_root;
use anyhow::{Context, Result, ensure};
use xtask::build;
use xtask::foreign::{debian_program, find_program, libraries};

use super::kernel::Kernel;

/// Free space on the root: a claim of the examples is 1 GiB.
const FREE: u64 = 4 << 30;
/// The disk's driver and the bus it is on.
const DISK_MODULES: [&str; 4] = ["virtio_pci", "virtio_blk", "ext4", "crc32c_intel"];

/// The root file system, while it is put together in a directory.
#[derive(Debug)]
pub(super) struct Staging {
    dir: PathBuf,
    bytes: u64,
}

impl Staging {
    /// An empty one at `dir`, with busybox under its applets' names.
    pub(super) fn new(dir: &Path) -> Result<Self> {
        if dir.exists() {
            fs::remove_dir_all(dir).with_context(|| dir.display().to_string())?;
        }
        let mut staging = Self { dir: dir.to_path_buf(), bytes: 0 };
        for name in
            ["dev", "etc", "proc", "sys", "run", "tmp", "root", "var/lib", "var/tmp", "lab", "usr/bin", "mnt"]
        {
            fs::create_dir_all(dir.join(name)).with_context(|| dir.display().to_string())?;
        }
        fs::set_permissions(dir.join("tmp"), fs::Permissions::from_mode(0o1777))?;
        let busybox = busybox()?;
        staging.put(&busybox, Path::new("/bin/busybox"))?;
        for applet in applets(&busybox)? {
            let link = staging.inside(Path::new(&applet));
            fs::create_dir_all(link.parent().unwrap_or(&link))?;
            if !link.exists() {
                std::os::unix::fs::symlink("/bin/busybox", &link)?;
            }
        }
        staging
            .write("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n")?;
        staging.write("/etc/group", "root:x:0:\nnogroup:x:65534:\n")?;
        staging.write("/etc/hosts", "127.0.0.1 localhost\n::1 localhost\n")?;
        staging.write("/etc/machine-id", "9d1f0c5e7a3b4c2d8e6f00112233445a\n")?;
        staging.put(&workspace_root().join("lab/init"), Path::new("/lab/init"))?;
        Ok(staging)
    }

    fn inside(&self, path: &Path) -> PathBuf {
        self.dir.join(path.strip_prefix("/").unwrap_or(path))
    }

    pub(super) fn write(&self, path: &str, text: &str) -> Result<()> {
        let to = self.inside(Path::new(path));
        fs::write(&to, text).with_context(|| to.display().to_string())
    }

    /// `from` at `to`; a link where it can be, since nothing here is changed.
    pub(super) fn put(&mut self, from: &Path, to: &Path) -> Result<()> {
        let from = fs::canonicalize(from).with_context(|| from.display().to_string())?;
        let to = self.inside(to);
        fs::create_dir_all(to.parent().unwrap_or(&to)).with_context(|| to.display().to_string())?;
        let _replaced = fs::remove_file(&to);
        if fs::hard_link(&from, &to).is_err() {
            fs::copy(&from, &to).with_context(|| format!("copy {} to {}", from.display(), to.display()))?;
        }
        self.bytes += fs::metadata(&to).map_or(0, |found| found.len());
        Ok(())
    }

    /// A program of ours, without what only a debugger reads: a guest reads,
    /// copies and digests it in emulation.
    pub(super) fn put_stripped(&mut self, from: &Path, to: &[PathBuf]) -> Result<()> {
        let stripped = self.dir.with_extension("stripped");
        let strip = debian_program("strip", "binutils")?;
        build::run(Command::new(strip).arg("--strip-debug").arg("-o").arg(&stripped).arg(from))?;
        for to in to {
            self.put(&stripped, to)?;
        }
        fs::remove_file(&stripped).with_context(|| stripped.display().to_string())
    }

    /// A tree, but for what is built or is version control's.
    pub(super) fn put_tree(&mut self, from: &Path, to: &Path) -> Result<()> {
        fs::create_dir_all(self.inside(to)).with_context(|| to.display().to_string())?;
        for entry in fs::read_dir(from).with_context(|| from.display().to_string())? {
            let entry = entry.with_context(|| from.display().to_string())?;
            let name = entry.file_name();
            let kind = entry.file_type().with_context(|| entry.path().display().to_string())?;
            if kind.is_dir() && name != "target" && name != ".git" {
                self.put_tree(&entry.path(), &to.join(&name))?;
            } else if kind.is_file() {
                self.put(&entry.path(), &to.join(&name))?;
            }
        }
        Ok(())
    }

    /// The files of a directory of this machine, at their own paths; links become what they lead to.
    pub(super) fn put_files(&mut self, dir: &Path) -> Result<()> {
        for entry in fs::read_dir(dir).with_context(|| dir.display().to_string())? {
            let path = entry.with_context(|| dir.display().to_string())?.path();
            self.put(&path, &path)?;
        }
        Ok(())
    }

    pub(super) fn put_modules(&mut self, kernel: &Kernel) -> Result<()> {
        self.put_tree(&kernel.modules, &Path::new("/lib/modules").join(&kernel.release))
    }

    /// A program of this machine, at its own path, with the libraries that it is linked to.
    pub(super) fn put_program(&mut self, program: &str, package: &str) -> Result<()> {
        let path = debian_program(program, package)?;
        self.put(&path, &path)?;
        for library in libraries(&path)? {
            self.put(&library, &library)?;
        }
        Ok(())
    }

    /// Makes the file system, in a sparse file.
    pub(super) fn into_image(self, image: &Path) -> Result<()> {
        let _replaced = fs::remove_file(image);
        let file = fs::File::create(image).with_context(|| image.display().to_string())?;
        file.set_len(self.bytes + self.bytes / 8 + FREE).with_context(|| image.display().to_string())?;
        let mkfs = debian_program("mkfs.ext4", "e2fsprogs")?;
        let mut command = Command::new(mkfs);
        command.args(["-q", "-F", "-m", "0", "-O", "^has_journal", "-E", "root_owner=0:0", "-d"]);
        build::run(command.arg(&self.dir).arg(image))?;
        fs::remove_dir_all(&self.dir).with_context(|| self.dir.display().to_string())
    }
}

/// Busybox that needs no library: the first program in the guest.
fn busybox() -> Result<PathBuf> {
    let busybox = debian_program("busybox", "busybox-static")?;
    ensure!(
        libraries(&busybox)?.is_empty(),
        "{} is not static; install package busybox-static",
        busybox.display()
    );
    Ok(busybox)
}

fn applets(busybox: &Path) -> Result<Vec<String>> {
    let output = Command::new(busybox).arg("--list-full").output().context("busybox --list-full")?;
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect())
}

/// Packs `/init`, busybox and the modules that the disk needs.
pub(super) fn initramfs(kernel: &Kernel, image: &Path) -> Result<()> {
    let dir = image.with_extension("dir");
    if dir.exists() {
        fs::remove_dir_all(&dir).with_context(|| dir.display().to_string())?;
    }
    for name in ["bin", "dev", "proc", "root", "modules"] {
        fs::create_dir_all(dir.join(name)).with_context(|| dir.display().to_string())?;
    }
    let busybox = busybox()?;
    fs::copy(&busybox, dir.join("bin/busybox")).context("copy busybox")?;
    fs::copy(workspace_root().join("lab/initramfs-init"), dir.join("init"))
        .context("copy lab/initramfs-init")?;
    let mut order = String::new();
    for module in kernel.load_order(&DISK_MODULES)? {
        let name = module.file_name().unwrap_or_default();
        fs::copy(&module, dir.join("modules").join(name)).with_context(|| module.display().to_string())?;
        order.push_str(&format!("{}\n", name.to_string_lossy()));
    }
    fs::write(dir.join("modules/order"), order).context("modules/order")?;
    let archive = fs::File::create(image).with_context(|| image.display().to_string())?;
    let find = find_program("find").context("missing: find (package findutils)")?;
    let mut names = Command::new(find);
    let mut names = names.arg(".").current_dir(&dir).stdout(Stdio::piped()).spawn().context("find")?;
    let mut cpio = Command::new(&busybox);
    cpio.args(["cpio", "-o", "-H", "newc"]).current_dir(&dir).stderr(Stdio::null());
    cpio.stdin(names.stdout.take().context("find has a piped stdout")?).stdout(archive);
    build::run(&mut cpio)?;
    names.wait().context("find")?;
    fs::remove_dir_all(&dir).with_context(|| dir.display().to_string())
}
