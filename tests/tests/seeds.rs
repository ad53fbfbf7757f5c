//! Seeds of the fuzz target whose entry point is public.

use tests::seeds;

#[test]
fn seeds_of_mount_tables_hold() {
    seeds::run("mountinfo", |table| drop(linux::mountinfo::parse(table)));
}
