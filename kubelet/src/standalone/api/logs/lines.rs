//! What of a log a client asked for: the records of CRI's log format become the program's own lines.
//!
//! A record is `<time> <stream> <P|F> <text>`; P says that the program's line continues in the
//! next one (kubernetes, kubelet/kuberuntime/logs).

use jiff::Timestamp;
use proto::kubelet::LogsRequest;

#[derive(Debug)]
pub(super) struct Lines {
    /// So many lines are left out.
    skipped: u64,
    /// Records from before are left out.
    since: Option<Timestamp>,
    timestamps: bool,
    /// So many bytes may follow.
    bytes: Option<u64>,
    begins_line: bool,
}

#[derive(Debug, Clone, Copy)]
struct Record<'a> {
    time: &'a [u8],
    text: &'a [u8],
    is_part: bool,
}

impl<'a> Record<'a> {
    /// `None`: not in this format. Such a line is shown as it is.
    fn parse(line: &'a [u8]) -> Option<Self> {
        let mut fields = line.splitn(4, |byte| *byte == b' ');
        let (time, _stream, tag, text) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
        match tag {
            b"F" => Some(Self { time, text, is_part: false }),
            b"P" => Some(Self { time, text: text.strip_suffix(b"\n").unwrap_or(text), is_part: true }),
            _ => None,
        }
    }

    fn timestamp(self) -> Option<Timestamp> {
        std::str::from_utf8(self.time).ok()?.parse().ok()
    }
}

/// Whether the program's line ends with this record.
pub(super) fn ends_line(record: &[u8]) -> bool {
    Record::parse(record).is_none_or(|record| !record.is_part)
}

impl Lines {
    pub(super) fn new(request: &LogsRequest) -> Self {
        Self {
            skipped: 0,
            since: request.since.and_then(|time| Timestamp::from_nanosecond(time.into()).ok()),
            timestamps: request.timestamps,
            bytes: request.limit_bytes,
            begins_line: true,
        }
    }

    /// Leaves out so many lines.
    pub(super) fn skip(&mut self, lines: u64) {
        self.skipped = lines;
    }

    /// Whether the client has as many bytes as it asked for.
    pub(super) fn are_complete(&self) -> bool {
        self.bytes == Some(0)
    }

    /// Adds to `to` what is to be shown of a line of the file.
    pub(super) fn push(&mut self, line: &[u8], to: &mut Vec<u8>) {
        let record = Record::parse(line);
        if self.skipped > 0 {
            self.skipped -= u64::from(record.is_none_or(|record| !record.is_part));
            return;
        }
        let time = record.and_then(Record::timestamp);
        if let (Some(since), Some(time)) = (self.since, time)
            && time < since
        {
            return;
        }
        let from = to.len();
        match record {
            Some(record) => {
                if self.timestamps && self.begins_line {
                    to.extend_from_slice(record.time);
                    to.push(b' ');
                }
                to.extend_from_slice(record.text);
            }
            None => to.extend_from_slice(line),
        }
        self.begins_line = record.is_none_or(|record| !record.is_part);
        if let Some(left) = &mut self.bytes {
            let kept = usize::try_from(*left).unwrap_or(usize::MAX).min(to.len() - from);
            to.truncate(from + kept);
            *left -= kept as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORDS: [&str; 5] = [
        "2026-11-20T17:53:02.596223978Z stdout F hello world\n",
        "2026-11-20T17:53:03.596223978Z stdout P a long \n",
        "2026-11-20T17:53:03.7Z stderr F line\n",
        "2026-11-20T17:53:04Z stdout F \n",
        "no prefix\n",
    ];

    fn shown(request: LogsRequest, skipped: u64) -> String {
        let mut lines = Lines::new(&request);
        lines.skip(skipped);
        let mut output = Vec::new();
        for record in RECORDS {
            lines.push(record.as_bytes(), &mut output);
        }
        String::from_utf8(output).unwrap()
    }

    #[test]
    fn prefixes_go_and_parts_are_joined() {
        assert_eq!(shown(LogsRequest::default(), 0), "hello world\na long line\n\nno prefix\n");
    }

    #[test]
    fn lines_are_skipped_whole() {
        assert_eq!(shown(LogsRequest::default(), 1), "a long line\n\nno prefix\n");
        assert_eq!(shown(LogsRequest::default(), 2), "\nno prefix\n");
        assert_eq!(shown(LogsRequest::default(), 9), "");
        assert_eq!(RECORDS.iter().filter(|record| ends_line(record.as_bytes())).count(), 4);
    }

    #[test]
    fn a_line_begins_with_its_time_once() {
        let request = LogsRequest { timestamps: true, ..LogsRequest::default() };
        assert_eq!(
            shown(request, 0),
            "2026-11-20T17:53:02.596223978Z hello world\n2026-11-20T17:53:03.596223978Z a long line\n\
             2026-11-20T17:53:04Z \nno prefix\n"
        );
    }

    #[test]
    fn older_lines_and_bytes_beyond_the_limit_are_left_out() {
        let since: Timestamp = "2026-11-20T17:53:04Z".parse().unwrap();
        let since = i64::try_from(since.as_nanosecond()).unwrap();
        assert_eq!(shown(LogsRequest { since: Some(since), ..LogsRequest::default() }, 0), "\nno prefix\n");
        let limited = LogsRequest { limit_bytes: Some(16), ..LogsRequest::default() };
        assert_eq!(shown(limited, 0), "hello world\na lo");
        let mut lines = Lines::new(&limited_to(3));
        let mut output = Vec::new();
        lines.push(RECORDS[0].as_bytes(), &mut output);
        assert!(lines.are_complete() && output == b"hel");
    }

    fn limited_to(bytes: u64) -> LogsRequest {
        LogsRequest { limit_bytes: Some(bytes), ..LogsRequest::default() }
    }
}
