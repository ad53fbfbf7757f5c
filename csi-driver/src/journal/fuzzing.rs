//! Files of the journal, as a crash may have left them.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::boot;
use crate::model::records::{Attachment, SnapshotRecord, VolumeRecord};

/// An entry that is read is written in the same way each time.
pub fn journal_entry(input: &[u8]) {
    fn kept<R: Serialize + DeserializeOwned>(text: &[u8]) {
        let written =
            |record: &R| serde_json::to_vec(record).expect("records have string keys and finite numbers");
        let Ok(record) = serde_json::from_slice::<R>(text) else { return };
        let once = written(&record);
        let again = serde_json::from_slice::<R>(&once).expect("what was written is read");
        assert_eq!(written(&again), once);
    }
    kept::<VolumeRecord>(input);
    kept::<SnapshotRecord>(input);
    kept::<Attachment>(input);
    if let Ok(line) = boot::last_line(input) {
        assert!(line.begin < line.end && line.end <= line.len && line.len == input.len());
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn seeds_of_journal_entries_hold() {
        tests::seeds::run("journal_entry", super::journal_entry);
    }
}
