//! `up`: from nothing to a node that runs pods with volumes.

use std::path::Path;

use anyhow::{Result, bail};
use xtask::build::{products, require_root};
use xtask::progress::{complain, part, say, step};

use super::UpArguments;
use super::daemons;
use super::network;
use super::network_claim;
use super::place::Place;
use super::prepare;
use super::processes;
use super::record::{Record, require_group};

pub(crate) fn up(arguments: &UpArguments) -> Result<()> {
    require_root("up")?;
    let place = Place::new(&arguments.directory.path)?;
    require_group(&arguments.cgroup)?;
    if place.record().is_file() && daemons::are_up(&place)? {
        say(&format!("the node in {} is up", place.dir().display()));
        print_next(&place);
        return Ok(());
    }
    let built = part("build the static binaries", products)?;
    let _lock = place.lock_or_create()?;
    start(&place, arguments, &built).inspect_err(|_| {
        if place.record().is_file() {
            complain(&format!("to remove what is there: cargo xtask down{}", place.directory_flag()));
        }
    })?;
    say(&format!("\nthe node in {} is up", place.dir().display()));
    print_next(&place);
    Ok(())
}

fn start(place: &Place, arguments: &UpArguments, built: &Path) -> Result<()> {
    let record = match Record::read(place)? {
        // It describes the machine before an earlier `up`.
        Some(record) if record.is_claimed => {
            network_claim::take(place)?;
            record
        }
        unclaimed => {
            if let Some(record) = unclaimed {
                network_claim::release(place)?;
                processes::remove_empty_group(&record.cgroup)?;
            }
            step("look at the machine's network, as it is before", || claim(place, &arguments.cgroup))?
        }
    };
    step(&format!("copy the programs and plugins to {}", place.programs().display()), || {
        prepare::copy_programs(place, built)
    })?;
    step("make the sample image and the image of volume daemons", || prepare::make_images(place))?;
    step("write the network's configuration and the examples", || prepare::write_configuration(place))?;
    step("start hawser-kubelet and hawser-csi", || daemons::ensure_running(place, &record))?;
    step("create the StorageClass hawser", || daemons::apply_class(place))
}

/// Describes the machine, and claims its network and the node's control group: two nodes never share one.
fn claim(place: &Place, cgroup: &Path) -> Result<Record> {
    let look = || {
        if let Some(dir) = processes::other_node(place)? {
            bail!("the node in {} uses this network: cargo xtask down --dir {0}", dir.display());
        }
        network::require_free()?;
        Record::take(cgroup)
    };
    // Nothing was changed yet.
    let mut record = look().inspect_err(|_| drop(place.remove_unclaimed()))?;
    record.write(place)?;
    network_claim::take(place).inspect_err(|_| drop(place.remove_unclaimed()))?;
    processes::claim_group(cgroup).inspect_err(|_| {
        drop(network_claim::release(place));
        drop(place.remove_unclaimed());
    })?;
    record.is_claimed = true;
    record.write(place)?;
    Ok(record)
}

fn print_next(place: &Place) {
    let command = place.command();
    let command = command.display();
    say("type next, to run two pods that share a volume:\n");
    say(&format!("  {command} apply -f {}", place.examples().display()));
    say(&format!("  {command} wait pod one two --for=condition=Ready --timeout=2m"));
    say(&format!("  {command} get pods -o wide"));
    say(&format!("  {command} logs two"));
    say("\nfor a claim of your own: storageClassName: hawser");
    say("for an image of a registry without TLS: /etc/hawser/certs.d/HOST:PORT/hosts.toml with the line");
    say("  server = \"http://HOST:PORT\"");
    say(&format!("\n{command} is hawser-kubelet for this node: {command} --help"));
    say(&format!(
        "{} shows what the driver knows: mounts, volumes, snapshots, doctor; with upgrade it replaces daemons",
        place.driver_command().display()
    ));
    say(&format!(
        "logs: {}, {}",
        place.log_of(daemons::KUBELET).display(),
        place.log_of(daemons::DRIVER).display()
    ));
    say(&format!(
        "to remove everything, pods and volumes included: cargo xtask down{}",
        place.directory_flag()
    ));
}
