//! How far the copies of a driver that runs are: it tells on its metrics socket.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::config;
use crate::operations::metrics::COPY_BYTES;

/// A driver that does not answer says nothing.
const LIMIT: Duration = Duration::from_secs(1);

/// Bytes that are copied, and in all, by the id of what is made.
pub(super) type Copies = HashMap<String, Copied>;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Copied {
    pub(super) done_bytes: u64,
    pub(super) total_bytes: u64,
}

/// Empty where no driver answers: no copy is under way then.
pub(super) fn under_way(run_dir: &Path) -> Copies {
    page(&config::metrics_socket(run_dir)).map(|page| parse(&page)).unwrap_or_default()
}

fn page(socket: &Path) -> std::io::Result<String> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.set_write_timeout(Some(LIMIT))?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
    let mut page = String::new();
    stream.read_to_string(&mut page)?;
    Ok(page)
}

fn parse(page: &str) -> Copies {
    let mut copies = Copies::new();
    for line in page.lines() {
        let Some((labels, value)) =
            line.strip_prefix(COPY_BYTES).and_then(|rest| rest.strip_prefix("{id=\"")?.split_once("\"} "))
        else {
            continue;
        };
        let (Some((id, kind)), Ok(bytes)) = (labels.split_once("\",kind=\""), value.parse()) else {
            continue;
        };
        let copied = copies.entry(id.to_owned()).or_default();
        match kind {
            "done" => copied.done_bytes = bytes,
            "total" => copied.total_bytes = bytes,
            _ => {}
        }
    }
    copies
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_tells_what_is_done_and_what_is_to_do() {
        let page = "HTTP/1.0 200 OK\r\n\r\n# TYPE hawser_csi_copy_bytes gauge\n\
            hawser_csi_copy_bytes{id=\"snap-1\",kind=\"done\"} 3\n\
            hawser_csi_copy_bytes{id=\"snap-1\",kind=\"total\"} 9\n\
            hawser_csi_copied_bytes_total 7\n";
        assert_eq!(parse(page), [("snap-1".to_owned(), Copied { done_bytes: 3, total_bytes: 9 })].into());
        assert_eq!(parse(""), Copies::new());
    }
}
