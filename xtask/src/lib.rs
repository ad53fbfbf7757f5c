//! What `cargo xtask` and the programs that it starts have in common: cargo and
//! the static binaries, programs of other projects, lines on the terminal, what
//! libtest prints, room on the disk, the timeline of a trace file.

pub mod build;
pub mod foreign;
pub mod libtest;
pub mod progress;
pub mod room;
pub mod timeline;
