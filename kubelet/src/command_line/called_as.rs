//! The commands that users type to reach and to start this kubelet, for messages that say what to type next.

use std::sync::OnceLock;

/// `$HAWSER_COMMAND`, or else the program's name.
pub(crate) fn called_as() -> &'static str {
    static COMMAND: OnceLock<String> = OnceLock::new();
    COMMAND.get_or_init(|| {
        let set = std::env::var("HAWSER_COMMAND").ok().filter(|command| !command.is_empty());
        set.unwrap_or_else(|| "hawser-kubelet".to_owned())
    })
}

/// With `$HAWSER_START`, if the environment has it.
pub(crate) fn how_to_start() -> String {
    match std::env::var("HAWSER_START") {
        Ok(start) if !start.is_empty() => format!("start it again with `{start}`, or set --root-dir"),
        _ => "start one with 'hawser-kubelet run', or set --root-dir".to_owned(),
    }
}
