//! The host's iptables program, for configurations that request it by name.
//!
//! This module finds it, detects its variant, and passes it whole changes. Programs run in the
//! calling thread's network namespace.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};

/// Its places in common distributions; a runtime's PATH may be empty.
const USUAL_PLACES: [&str; 6] =
    ["/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/local/bin", "/usr/bin", "/bin"];

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IpVersion {
    V4,
    V6,
}

impl IpVersion {
    /// The program's name.
    pub fn program(self) -> &'static str {
        match self {
            Self::V4 => "iptables",
            Self::V6 => "ip6tables",
        }
    }

    fn legacy_program(self) -> &'static str {
        match self {
            Self::V4 => "iptables-legacy",
            Self::V6 => "ip6tables-legacy",
        }
    }
}

/// The kernel tables that the program changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// Rules of nf_tables, with xtables matches in them: [`crate::nftables`] sees them.
    NfTables,
    /// Its own tables.
    Legacy,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{program} is not installed: it is neither in PATH nor in {}", USUAL_PLACES.join(", "))]
    NotInstalled { program: &'static str },
    #[error("run {command}")]
    Run {
        command: String,
        #[source]
        source: io::Error,
    },
    /// It ran and failed.
    #[error("{command}: {status}: {stderr}")]
    Refused { command: String, status: ExitStatus, stderr: String },
}

pub type Result<T> = std::result::Result<T, Error>;

/// The installed program of one IP version.
#[derive(Debug, Clone)]
pub struct IpTables {
    version: IpVersion,
    program: PathBuf,
    variant: Variant,
}

impl IpTables {
    /// Searches PATH, then the usual places, and runs `--version`: one process, which reads no
    /// table.
    pub fn find(version: IpVersion) -> Result<Self> {
        Self::find_in(version, places())
    }

    /// The program for the legacy tables: the usual one if it is of that variant, otherwise the one
    /// with `-legacy` in its name.
    pub fn find_legacy(version: IpVersion) -> Result<Self> {
        match Self::find(version) {
            Ok(usual) if usual.variant == Variant::Legacy => Ok(usual),
            Ok(_) | Err(Error::NotInstalled { .. }) => {
                Self::find_named(version, version.legacy_program(), places())
            }
            Err(e) => Err(e),
        }
    }

    fn find_in(version: IpVersion, places: impl IntoIterator<Item = PathBuf>) -> Result<Self> {
        Self::find_named(version, version.program(), places)
    }

    fn find_named(
        version: IpVersion,
        name: &'static str,
        places: impl IntoIterator<Item = PathBuf>,
    ) -> Result<Self> {
        let program = places
            .into_iter()
            .filter(|place| place.is_absolute())
            .map(|place| place.join(name))
            .find(|program| is_executable(program))
            .ok_or(Error::NotInstalled { program: name })?;
        let answer = run(Command::new(&program).arg("--version"), None)?;
        Ok(Self { version, program, variant: variant(&answer) })
    }

    pub fn version(&self) -> IpVersion {
        self.version
    }

    pub fn variant(&self) -> Variant {
        self.variant
    }

    /// The table's chains and rules as printed by `-S` (`-P`, `-N`, `-A` lines). The legacy variant
    /// creates a missing table: check [`legacy_tables`] first.
    pub fn rules(&self, table: &str) -> Result<Vec<String>> {
        let output = self.run(&["-t", table, "-S"])?;
        Ok(output.lines().map(str::to_owned).collect())
    }

    /// Runs the program with `--wait` and `arguments`, and returns its output.
    pub fn run(&self, arguments: &[&str]) -> Result<String> {
        run(Command::new(&self.program).arg("--wait").args(arguments), None)
    }

    /// Applies all `commands` to one table, or none: `-A`, `-I`, `-D`, `-F`, `-X` as on the command
    /// line, without `-t`, with arguments that contain blanks in double quotes ([`quote`]).
    /// `:CHAIN - [0:0]` creates a chain or empties an existing one; `-N` refuses an existing one. Runs
    /// one process; without commands, none.
    pub fn apply<S: AsRef<str>>(&self, table: &str, commands: &[S]) -> Result<()> {
        self.apply_each(&[(table, commands)])
    }

    /// [`Self::apply`] for several tables in one process. It stops at the first table that fails;
    /// earlier tables are changed then.
    pub fn apply_each<S: AsRef<str>>(&self, changes: &[(&str, &[S])]) -> Result<()> {
        let mut script = String::new();
        for (table, commands) in changes.iter().filter(|(_, commands)| !commands.is_empty()) {
            script += &format!("*{table}\n");
            for command in *commands {
                script += command.as_ref();
                script.push('\n');
            }
            script += "COMMIT\n";
        }
        if script.is_empty() {
            return Ok(());
        }
        let mut restore = self.program.clone().into_os_string();
        restore.push("-restore");
        run(Command::new(restore).args(["--noflush", "--wait"]), Some(&script)).map(drop)
    }
}

/// Quotes one argument of a restore command if necessary.
pub fn quote(argument: &str) -> String {
    let plain = |c: char| c.is_ascii_graphic() && !['"', '\\', '\'', '#'].contains(&c);
    if !argument.is_empty() && argument.chars().all(plain) {
        return argument.to_owned();
    }
    let mut quoted = String::from("\"");
    for c in argument.chars() {
        if ['"', '\\'].contains(&c) {
            quoted.push('\\');
        }
        quoted.push(c);
    }
    quoted.push('"');
    quoted
}

/// The legacy variant's tables in this namespace; none if its module is not loaded. Reading the
/// list creates no table and loads no module (`xt_proto_init`), unlike the legacy program itself.
pub fn legacy_tables(version: IpVersion) -> io::Result<Vec<String>> {
    let list = match version {
        IpVersion::V4 => "/proc/thread-self/net/ip_tables_names",
        IpVersion::V6 => "/proc/thread-self/net/ip6_tables_names",
    };
    match std::fs::read_to_string(list) {
        Ok(names) => Ok(names.lines().map(str::to_owned).collect()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e),
    }
}

/// Parses `iptables v1.8.9 (nf_tables)`. Versions before 1.8 had only one variant and do not name
/// it.
fn variant(answer: &str) -> Variant {
    if answer.contains("(nf_tables)") { Variant::NfTables } else { Variant::Legacy }
}

fn places() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).chain(USUAL_PLACES.map(PathBuf::from)).collect()
}

fn is_executable(program: &Path) -> bool {
    program.is_file() && nix::unistd::access(program, nix::unistd::AccessFlags::X_OK).is_ok()
}

fn run(command: &mut Command, input: Option<&str>) -> Result<String> {
    let words = words(command);
    let refused = |source| Error::Run { command: words.clone(), source };
    let Output { status, stdout, stderr } = output(command, input).map_err(refused)?;
    if !status.success() {
        let stderr = String::from_utf8_lossy(&stderr).trim().to_owned();
        return Err(Error::Refused { command: words, status, stderr });
    }
    Ok(String::from_utf8_lossy(&stdout).into_owned())
}

fn output(command: &mut Command, input: Option<&str>) -> io::Result<Output> {
    command.stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() });
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    if let (Some(mut stdin), Some(input)) = (child.stdin.take(), input) {
        // iptables-restore reads everything before it prints, except errors. If it ended early
        // (EPIPE), stderr has the reason.
        match stdin.write_all(input.as_bytes()) {
            Err(e) if e.kind() != io::ErrorKind::BrokenPipe => return Err(e),
            _ => {}
        }
    }
    child.wait_with_output()
}

fn words(command: &Command) -> String {
    let mut words = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args() {
        words.push(' ');
        words += &argument.to_string_lossy();
    }
    words
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A directory with these programs in it: links to one script that is never
    /// written (ETXTBSY), which does what the file beside the link says.
    fn host(programs: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, says) in programs {
            let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/scripted");
            symlink(program, dir.path().join(name)).unwrap();
            std::fs::write(dir.path().join(format!("{name}.says")), says).unwrap();
        }
        dir
    }

    fn find(version: IpVersion, dir: &tempfile::TempDir) -> Result<IpTables> {
        IpTables::find_in(version, [PathBuf::from("relative"), dir.path().to_owned()])
    }

    #[test]
    fn the_variant_is_told_by_the_version() {
        for (answer, expected) in [
            ("iptables v1.8.9 (nf_tables)", Variant::NfTables),
            ("iptables v1.8.9 (legacy)", Variant::Legacy),
            ("iptables v1.6.1", Variant::Legacy),
        ] {
            let dir = host(&[("ip6tables", &format!("echo '{answer}'"))]);
            assert_eq!(find(IpVersion::V6, &dir).unwrap().variant(), expected);
        }
    }

    #[test]
    fn a_missing_program_and_a_file_that_is_none_are_not_installed() {
        let dir = host(&[]);
        assert!(matches!(find(IpVersion::V4, &dir), Err(Error::NotInstalled { program: "iptables" })));
        std::fs::write(dir.path().join("iptables"), "no program").unwrap();
        assert!(matches!(find(IpVersion::V4, &dir), Err(Error::NotInstalled { .. })));
    }

    #[test]
    fn a_change_goes_to_restore_as_one_table() {
        let dir = host(&[
            ("iptables", "echo 'iptables v1.8.9 (nf_tables)'"),
            ("iptables-restore", "echo \"$@\" > \"$0.seen\"; cat >> \"$0.seen\""),
        ]);
        let iptables = find(IpVersion::V4, &dir).unwrap();
        let seen = dir.path().join("iptables-restore.seen");
        iptables.apply::<&str>("nat", &[]).unwrap();
        assert!(!seen.exists(), "no commands, no process");
        iptables.apply("nat", &[":C - [0:0]", "-A C -j ACCEPT"]).unwrap();
        let expected = "--noflush --wait\n*nat\n:C - [0:0]\n-A C -j ACCEPT\nCOMMIT\n";
        assert_eq!(std::fs::read_to_string(&seen).unwrap(), expected);
        let none: &[&str] = &[];
        iptables.apply_each(&[("raw", none), ("mangle", &["-F A"]), ("nat", &["-F B"])]).unwrap();
        let expected = "--noflush --wait\n*mangle\n-F A\nCOMMIT\n*nat\n-F B\nCOMMIT\n";
        assert_eq!(std::fs::read_to_string(&seen).unwrap(), expected);
    }

    #[test]
    fn a_refusal_has_the_programs_own_words() {
        let dir = host(&[
            (
                "iptables",
                "[ \"$1\" = --version ] && exit; echo 'No chain/target/match by that name.' >&2; exit 1",
            ),
            // Does not even read.
            ("iptables-restore", "echo 'line 2 failed' >&2; exit 2"),
        ]);
        let iptables = find(IpVersion::V4, &dir).unwrap();
        let refused = iptables.rules("nat").unwrap_err().to_string();
        let path = dir.path().join("iptables").display().to_string();
        assert_eq!(
            refused,
            format!("{path} --wait -t nat -S: exit status: 1: No chain/target/match by that name.")
        );
        let long = vec!["-A C -j ACCEPT"; 20_000];
        let refused = iptables.apply("nat", &long).unwrap_err();
        assert!(matches!(&refused, Error::Refused { stderr, .. } if stderr == "line 2 failed"), "{refused}");
    }

    #[test]
    fn what_restore_would_take_apart_is_quoted() {
        assert_eq!(quote("10.0.0.0/8"), "10.0.0.0/8");
        assert_eq!(quote("two words"), "\"two words\"");
        assert_eq!(quote("name: \"net\" \\"), r#""name: \"net\" \\""#);
        assert_eq!(quote(""), "\"\"");
        assert_eq!(quote("#1"), "\"#1\"");
    }
}
