//! Entry points of the fuzz targets in `fuzz/`: what others wrote, as the driver reads it.

pub use crate::journal::fuzzing::journal_entry;
pub use crate::wire::server::fuzzing::{frames, header_blocks};

#[cfg(test)]
mod tests {
    use tests::seeds;

    #[test]
    fn seeds_of_header_blocks_hold() {
        seeds::run("header_blocks", super::header_blocks);
    }

    #[test]
    fn seeds_of_frames_hold() {
        seeds::run("frames", super::frames);
    }

    #[test]
    fn seeds_of_journal_entries_hold() {
        seeds::run("journal_entry", super::journal_entry);
    }
}
