//! Seeds of the fuzz targets whose entry points are public.

#[path = "../../fuzz/targets/messages/decoded.rs"]
mod decoded;

use tests::seeds;

#[test]
fn seeds_of_mount_tables_hold() {
    seeds::run("mountinfo", |table| drop(linux::mountinfo::parse(table)));
}

#[test]
fn seeds_of_messages_of_daemons_and_drivers_hold() {
    seeds::run("messages", decoded::same_again);
}
