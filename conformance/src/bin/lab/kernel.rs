//! Kernels of distributions: fetched as packages from Debian's archive by
//! private lists, unpacked below `target/lab`, never installed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use ::tests::binaries::target_dir;
use anyhow::{Context, Result, bail, ensure};
use xtask::build;
use xtask::foreign::debian_program;

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Names of `--kernel` and the suites of Debian's archive that they stand for.
pub(super) const RELEASES: [(&str, &str); 2] = [("debian-12", "bookworm"), ("debian-13", "trixie")];

/// A kernel image and its modules, uncompressed, with `modules.dep`.
#[derive(Debug)]
pub(super) struct Kernel {
    /// As `--kernel` names it.
    pub(super) name: String,
    /// As `uname -r` names it.
    pub(super) release: String,
    pub(super) image: PathBuf,
    pub(super) modules: PathBuf,
}

impl Kernel {
    /// Whether it has FUSE_NOTIFY_RESEND: requests of a dead daemon go to the next one.
    pub(super) fn can_send_again(&self) -> bool {
        self.is_6_9()
    }

    /// Whether it has FUSE_PASSTHROUGH: by its configuration, or by its release if there is none beside its image.
    pub(super) fn passes_through(&self) -> bool {
        let config = self.image.with_file_name(format!("config-{}", self.release));
        match fs::read_to_string(config) {
            Ok(config) => config.lines().any(|line| line == "CONFIG_FUSE_PASSTHROUGH=y"),
            Err(_) => self.is_6_9(),
        }
    }

    /// Or newer.
    fn is_6_9(&self) -> bool {
        let mut numbers = self.release.split(['.', '-']).map_while(|number| number.parse::<u32>().ok());
        (numbers.next(), numbers.next()) >= (Some(6), Some(9))
    }

    /// `wanted`: a name of [`RELEASES`], a kernel's package, or a directory with
    /// `boot/vmlinuz-*` and `lib/modules/*`, as a package unpacks to.
    pub(super) fn fetch(wanted: &str) -> Result<Self> {
        let cache = target_dir().join("lab/kernels");
        if let Some((name, suite)) = RELEASES.iter().find(|(name, _)| *name == wanted) {
            let dir = cache.join(name);
            if !dir.join("complete").is_file() {
                download(suite, &dir).with_context(|| format!("fetch the kernel of {name}"))?;
            }
            return Self::in_dir(name, &dir.join("root"));
        }
        let path = Path::new(wanted);
        if path.is_dir() {
            return Self::in_dir(wanted, path);
        }
        ensure!(
            path.extension().is_some_and(|extension| extension == "deb") && path.is_file(),
            "--kernel {wanted}: neither {} nor a package (.deb) nor a directory with boot/ and lib/modules/",
            RELEASES.map(|(name, _)| name).join(", ")
        );
        let dir = cache.join("package").join(path.file_stem().unwrap_or_default());
        if !dir.join("complete").is_file() {
            unpack(path, &dir)?;
        }
        Self::in_dir(wanted, &dir.join("root"))
    }

    fn in_dir(name: &str, root: &Path) -> Result<Self> {
        // Newer packages have everything below usr/.
        let modules = ["lib/modules", "usr/lib/modules"].map(|dir| root.join(dir));
        let modules = modules.iter().find(|dir| dir.is_dir());
        let modules = modules.with_context(|| format!("{}: no lib/modules", root.display()))?;
        let mut releases = fs::read_dir(modules)?.flatten().map(|entry| entry.file_name());
        let release = releases.next().with_context(|| format!("{}: empty", modules.display()))?;
        let release = release.to_string_lossy().into_owned();
        let images = [root.join(format!("boot/vmlinuz-{release}")), modules.join(&release).join("vmlinuz")];
        let image = images.iter().find(|image| image.is_file());
        let image = image.with_context(|| format!("{}: no boot/vmlinuz-{release}", root.display()))?;
        let kernel =
            Self { name: name.to_owned(), image: image.clone(), modules: modules.join(&release), release };
        ensure!(
            kernel.modules.join("modules.dep").is_file(),
            "{}: no modules.dep; run depmod",
            kernel.modules.display()
        );
        Ok(kernel)
    }

    /// The files of these modules and of what they need, in the order in which
    /// they can be loaded. What is built in has no file.
    pub(super) fn load_order(&self, names: &[&str]) -> Result<Vec<PathBuf>> {
        let list = self.modules.join("modules.dep");
        let list = fs::read_to_string(&list).with_context(|| list.display().to_string())?;
        let needs: BTreeMap<&str, Vec<&str>> = list
            .lines()
            .filter_map(|line| line.split_once(':'))
            .map(|(file, needed)| (file, needed.split_whitespace().collect()))
            .collect();
        let mut order = Vec::new();
        for name in names {
            let file = needs.keys().find(|file| module_name(file) == *name);
            if let Some(file) = file {
                push_with_needs(file, &needs, &mut order);
            }
        }
        Ok(order.iter().map(|file| self.modules.join(file)).collect())
    }
}

/// `kernel/drivers/block/virtio_blk.ko` is virtio_blk.
fn module_name(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or(file);
    name.split(".ko").next().unwrap_or(name).replace('-', "_")
}

fn push_with_needs<'a>(file: &'a str, needs: &BTreeMap<&'a str, Vec<&'a str>>, order: &mut Vec<&'a str>) {
    if order.contains(&file) {
        return;
    }
    for needed in needs.get(file).into_iter().flatten() {
        push_with_needs(needed, needs, order);
    }
    order.push(file);
}

/// apt with lists and a cache of its own: what the machine has configured and
/// downloaded is neither changed nor relied on, but for its mirror and its keys.
fn download(suite: &str, dir: &Path) -> Result<()> {
    ensure!(
        Path::new(KEYRING).is_file(),
        "missing: {KEYRING} (package debian-archive-keyring), by which the archive's signature is checked"
    );
    let mirror = mirror()?;
    let _present = fs::remove_dir_all(dir);
    let apt = dir.join("apt");
    for part in ["lists/partial", "cache/archives/partial"] {
        fs::create_dir_all(apt.join(part)).with_context(|| apt.display().to_string())?;
    }
    let list = apt.join("sources.list");
    let line = format!("deb [arch=amd64 signed-by={KEYRING}] {mirror} {suite} main\n");
    fs::write(&list, line).with_context(|| list.display().to_string())?;
    let options = [
        format!("Dir::Etc::sourcelist={}", list.display()),
        "Dir::Etc::sourceparts=-".to_owned(),
        format!("Dir::State::lists={}", apt.join("lists").display()),
        format!("Dir::Cache={}", apt.join("cache").display()),
        "APT::Sandbox::User=root".to_owned(),
        "APT::Architecture=amd64".to_owned(),
        "Acquire::Languages=none".to_owned(),
        "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".to_owned(),
    ];
    let apt_command = |program: &str| -> Result<Command> {
        let mut command = Command::new(debian_program(program, "apt")?);
        for option in &options {
            command.args(["-o", option]);
        }
        command.current_dir(&apt);
        Ok(command)
    };
    build::run(apt_command("apt-get")?.args(["--quiet", "update"]))?;
    let package = package_of(apt_command("apt-cache")?)?;
    build::run(apt_command("apt-get")?.args(["--quiet", "download", &package]))?;
    let found = fs::read_dir(&apt)?.flatten().map(|entry| entry.path());
    let mut found = found.filter(|path| path.extension().is_some_and(|extension| extension == "deb"));
    let file = found.next().with_context(|| format!("apt-get download {package} left no package"))?;
    unpack(&file, dir)?;
    fs::remove_dir_all(&apt).with_context(|| apt.display().to_string())
}

/// The package that the distribution's newest cloud kernel is in.
fn package_of(mut apt_cache: Command) -> Result<String> {
    let output = apt_cache.args(["depends", "linux-image-cloud-amd64"]).output().context("apt-cache")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let package = text.lines().find_map(|line| line.trim().strip_prefix("Depends: linux-image-"));
    let package = package.with_context(|| {
        format!("apt-cache depends linux-image-cloud-amd64: {}", String::from_utf8_lossy(&output.stderr))
    })?;
    Ok(format!("linux-image-{package}"))
}

/// Where this machine gets its Debian packages from.
fn mirror() -> Result<String> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    let parts = fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten();
    let mut parts: Vec<_> = parts.map(|entry| entry.path()).collect();
    parts.sort();
    let is_source = |path: &PathBuf| {
        path.extension().is_some_and(|extension| extension == "list" || extension == "sources")
    };
    files.extend(parts.into_iter().filter(is_source));
    let texts = files.iter().filter_map(|file| fs::read_to_string(file).ok());
    for text in texts {
        if let Some(mirror) = mirror_in(&text) {
            return Ok(mirror);
        }
    }
    bail!(
        "no source of Debian packages in /etc/apt; fetch a kernel's package from elsewhere and give it as --kernel FILE.deb"
    )
}

fn mirror_in(sources: &str) -> Option<String> {
    let lines = sources.lines().filter(|line| !line.trim_start().starts_with('#'));
    let words = lines.flat_map(str::split_whitespace);
    let mut mirrors = words.filter(|word| word.starts_with("http://") || word.starts_with("https://"));
    mirrors.find(|word| word.trim_end_matches('/').ends_with("/debian")).map(str::to_owned)
}

fn unpack(package: &Path, dir: &Path) -> Result<()> {
    let root = dir.join("root");
    fs::create_dir_all(&root).with_context(|| root.display().to_string())?;
    build::run(Command::new(debian_program("dpkg", "dpkg")?).arg("-x").arg(package).arg(&root))?;
    let modules = if root.join("lib/modules").is_dir() { root.join("lib") } else { root.join("usr/lib") };
    let mut compressed = Vec::new();
    find_compressed(&modules, &mut compressed)?;
    if !compressed.is_empty() {
        let xz = debian_program("xz", "xz-utils")?;
        for files in compressed.chunks(500) {
            build::run(Command::new(&xz).arg("--decompress").args(files)).map_err(|_| {
                anyhow::anyhow!("xz --decompress failed on modules below {}", modules.display())
            })?;
        }
    }
    // modules.dep names the files as they are now.
    let base = if modules.ends_with("usr/lib") { root.join("usr") } else { root.clone() };
    let mut releases = fs::read_dir(modules.join("modules"))?.flatten();
    let release = releases.next().context("the package has no modules")?.file_name();
    let busybox = debian_program("busybox", "busybox-static")?;
    build::run(Command::new(busybox).args(["depmod", "-b"]).arg(&base).arg(&release))?;
    fs::write(dir.join("complete"), "").with_context(|| dir.display().to_string())
}

fn find_compressed(dir: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let entry = entry.with_context(|| dir.display().to_string())?;
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            find_compressed(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "xz") {
            found.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_is_found_in_either_form_of_a_source_file() {
        let deb822 =
            "Types: deb\nURIs: http://deb.debian.org/debian-security\nURIs: http://deb.debian.org/debian\n";
        assert_eq!(mirror_in(deb822).unwrap(), "http://deb.debian.org/debian");
        let line = "# deb http://a/debian x main\ndeb [signed-by=/k] https://mirror/debian/ bookworm main\n";
        assert_eq!(mirror_in(line).unwrap(), "https://mirror/debian/");
        assert_eq!(mirror_in("deb http://archive.ubuntu.com/ubuntu noble main"), None);
    }

    #[test]
    fn what_a_module_needs_is_loaded_before_it() {
        let needs =
            BTreeMap::from([("a/b.ko", vec!["c.ko", "d.ko"]), ("c.ko", vec!["d.ko"]), ("d.ko", vec![])]);
        let mut order = Vec::new();
        push_with_needs("a/b.ko", &needs, &mut order);
        assert_eq!(order, ["d.ko", "c.ko", "a/b.ko"]);
        assert_eq!(module_name("kernel/drivers/block/virtio-blk.ko.xz"), "virtio_blk");
    }

    #[test]
    fn requests_are_sent_again_from_linux_6_9_on() {
        let can = |release: &str| {
            let paths = [PathBuf::new(), PathBuf::new()];
            let [image, modules] = paths;
            Kernel { name: String::new(), release: release.to_owned(), image, modules }.can_send_again()
        };
        assert!(can("6.12.9-cloud-amd64") && can("6.9.0") && can("7.0-rc1"));
        assert!(!can("6.1.0-30-cloud-amd64") && !can("6.8.12") && !can("5.19.0"));
    }
}
