//! The command that users type to reach this kubelet, for messages that say what to type next.

use std::sync::OnceLock;

/// `$HAWSER_COMMAND`, or else the program's name.
pub(crate) fn called_as() -> &'static str {
    static COMMAND: OnceLock<String> = OnceLock::new();
    COMMAND.get_or_init(|| {
        let set = std::env::var("HAWSER_COMMAND").ok().filter(|command| !command.is_empty());
        set.unwrap_or_else(|| "hawser-kubelet".to_owned())
    })
}
