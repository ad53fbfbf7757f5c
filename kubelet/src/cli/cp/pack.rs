//! Files of this machine as a tar archive, piece by piece.

use std::io::{self, Write};
use std::path::Path;

use tar::{Builder, HeaderMode};
use tokio::sync::mpsc;

use crate::cli::Error;

const PIECE: usize = 64 << 10;

/// Sends the archive of `source`, a file or a directory, which is called `name` there. Links are packed as
/// links.
pub(super) fn pack(source: &Path, name: &Path, pieces: mpsc::Sender<Vec<u8>>) -> Result<(), Error> {
    let packed = || {
        let mut tar = Builder::new(Pieces { pieces, piece: Vec::with_capacity(PIECE) });
        tar.follow_symlinks(false);
        tar.mode(HeaderMode::Complete);
        if source.symlink_metadata()?.is_dir() {
            tar.append_dir_all(name, source)?;
        } else {
            tar.append_path_with_name(source, name)?;
        }
        tar.into_inner()?.flush()
    };
    packed().map_err(|error| Error::ReadFile { path: source.to_owned(), source: error })
}

struct Pieces {
    pieces: mpsc::Sender<Vec<u8>>,
    piece: Vec<u8>,
}

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.piece.extend_from_slice(bytes);
        if self.piece.len() >= PIECE {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let piece = std::mem::replace(&mut self.piece, Vec::with_capacity(PIECE));
        let sent = if piece.is_empty() { Ok(()) } else { self.pieces.blocking_send(piece) };
        sent.map_err(|_container_ended| io::ErrorKind::BrokenPipe.into())
    }
}
