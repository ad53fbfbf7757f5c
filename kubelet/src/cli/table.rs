//! Tables in kubectl's format: columns as wide as needed, three spaces apart.

use std::io::{self, Write};

use super::printable::printable_line;

/// The minimum column width, with its spaces.
const NARROWEST: usize = 6;
const GAP: usize = 3;

#[derive(Debug)]
pub(super) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(super) fn new(head: Option<Vec<String>>) -> Self {
        Self { rows: head.into_iter().collect() }
    }

    pub(super) fn push(&mut self, row: Vec<String>) {
        self.rows.push(row.iter().map(|cell| printable_line(cell).into_owned()).collect());
    }

    pub(super) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let widths = self.widths();
        for row in &self.rows {
            let mut line = String::new();
            for (at, cell) in row.iter().enumerate() {
                let width = widths[at];
                line.push_str(&format!("{cell:<width$}"));
            }
            writeln!(out, "{line}")?;
        }
        Ok(())
    }

    fn widths(&self) -> Vec<usize> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or_default();
        let widest =
            |at: usize| self.rows.iter().filter_map(|row| row.get(at)).map(|cell| cell.chars().count()).max();
        let mut widths: Vec<usize> =
            (0..columns).map(|at| (widest(at).unwrap_or_default() + GAP).max(NARROWEST)).collect();
        if let Some(last) = widths.last_mut() {
            *last = 0;
        }
        widths
    }
}
