//! Why a plugin has no result.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use serde_json::Value;

#[derive(Debug, thiserror::Error)]
pub enum PluginProblem {
    // The words of libcni.
    #[error("failed to find plugin {plugin:?} in path [{}]", .bin_dir.display())]
    Missing { plugin: String, bin_dir: PathBuf },
    #[error("run {}", .program.display())]
    Run {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("no answer within {} s, killed", .limit.as_secs())]
    Timeout { limit: Duration },
    /// From its error object.
    #[error("code {code}: {message}{}", .details.as_ref().map(|d| format!(": {d}")).unwrap_or_default())]
    Failed { code: Value, message: String, details: Option<String> },
    #[error("netplugin failed: {output:?} ({status})")]
    NoErrorObject { output: String, status: ExitStatus },
    #[error("netplugin failed with no error message: {status}")]
    Silent { status: ExitStatus },
    #[error("its result is not JSON")]
    Result {
        #[source]
        source: serde_json::Error,
    },
}
