//! Tables in kubectl's format: columns as wide as needed, three spaces apart.

use std::io::{self, Write};

use super::printable::printable_line;

/// The minimum column width, with its spaces.
const NARROWEST: usize = 6;
const GAP: usize = 3;

#[derive(Debug)]
pub(super) struct Table {
    rows: Vec<Vec<String>>,
    /// Of each column, with its gap. They never shrink.
    widths: Vec<usize>,
}

impl Table {
    pub(super) fn new(head: Option<Vec<String>>) -> Self {
        Self { rows: head.into_iter().collect(), widths: Vec::new() }
    }

    pub(super) fn with_head<const N: usize>(head: [&str; N]) -> Self {
        Self::new(Some(head.map(str::to_owned).to_vec()))
    }

    pub(super) fn push(&mut self, row: Vec<String>) {
        self.rows.push(row.iter().map(|cell| printable_line(cell).into_owned()).collect());
    }

    /// Writes the rows that were added since the last time.
    pub(super) fn flush(&mut self, out: &mut dyn Write) -> io::Result<()> {
        for row in &self.rows {
            self.widths.resize(self.widths.len().max(row.len()), NARROWEST);
            for (width, cell) in self.widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count() + GAP);
            }
        }
        for row in self.rows.drain(..) {
            let mut line = String::new();
            for (at, cell) in row.iter().enumerate() {
                // The last column has no gap.
                let width = if at + 1 == self.widths.len() { 0 } else { self.widths[at] };
                line.push_str(&format!("{cell:<width$}"));
            }
            writeln!(out, "{line}")?;
        }
        Ok(())
    }
}
