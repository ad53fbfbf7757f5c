//! The commands of `hawser-csi`.

use clap::{Parser, Subcommand};

use super::doctor::Doctor;
use super::upgrade::Upgrade;
use super::views::View;
use crate::config::Flags;

/// CSI driver of Hawser: volumes from a pool on this node, each served by one FUSE daemon.
///
/// Without a command it runs the driver: it serves CSI on KUBELET-DIR/plugins/DRIVER-NAME/csi.sock
/// and registers itself with the kubelet through KUBELET-DIR/plugins_registry. SIGTERM ends the
/// driver; volumes and daemons continue, and the next start adopts them. The commands report a
/// driver's state, running or not; only `doctor --repair` and `upgrade` change something.
#[derive(Debug, Parser)]
#[command(
    name = "hawser-csi",
    version,
    subcommand_negates_reqs = true,
    args_conflicts_with_subcommands = true
)]
pub struct CommandLine {
    #[command(flatten)]
    pub driver: Option<Flags>,
    #[command(subcommand)]
    pub command: Option<Command>,
}

#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    #[command(flatten)]
    View(View),
    /// Shows problems on this node, and how to repair them.
    ///
    /// Takes the same flags as the driver. Exits with 0 if nothing is left to repair, 1 if
    /// something is, and 2 if it could not look.
    Doctor(Box<Doctor>),
    /// Replaces daemons by daemons of the program or image that the running driver is configured with.
    ///
    /// Use it after an upgrade of hawser-volume or of the mount image. The new daemon starts while the
    /// earlier daemon serves. If the new daemon cannot continue the connection, the earlier one is not
    /// stopped. Otherwise it replaces the earlier daemon: users see a pause of some milliseconds and no
    /// error. If the new daemon then does not serve, a daemon of the earlier program continues. Exits
    /// with 0 if each volume's daemon is of the configured program, and with 1 if one is not, or if no
    /// driver answers.
    Upgrade(Upgrade),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_needs_none_of_the_drivers_flags_and_the_driver_no_command() {
        let parse = |line: &str| CommandLine::try_parse_from(line.split(' '));
        let view = parse("hawser-csi volumes --state-dir /s -o json").unwrap();
        assert!(view.driver.is_none() && matches!(view.command, Some(Command::View(View::Volumes(_)))));
        let run = parse("hawser-csi --node-id n --pool /p --manifests /m --mount-image i").unwrap();
        assert_eq!(run.driver.unwrap().node_id, "n");
        assert!(run.command.is_none());
        for upgrade in ["hawser-csi upgrade vol-1", "hawser-csi upgrade --all --force -o json"] {
            assert!(matches!(parse(upgrade).unwrap().command, Some(Command::Upgrade(_))));
        }
        for wrong in ["hawser-csi upgrade", "hawser-csi upgrade --all vol-1"] {
            parse(wrong).unwrap_err();
        }
        for wrong in ["hawser-csi", "hawser-csi --node-id n", "hawser-csi --node-id n volumes"] {
            parse(wrong).unwrap_err();
        }
    }
}
