//! Log lines with untrusted text of images, pods and daemons, which may contain line breaks.
//!
//! Invariant: an event is one line, whose only control character is its final newline.

use std::fmt::{self, Display, Write};

use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Writes the output of another format on one line.
#[derive(Debug)]
pub(crate) struct OneLine<F>(pub(crate) F);

impl<S, N, F> FormatEvent<S, N> for OneLine<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut line = String::new();
        self.0.format_event(context, Writer::new(&mut line), event)?;
        writeln!(writer, "{}", escaped(line.strip_suffix('\n').unwrap_or(&line)))
    }
}

/// Shows control characters as Rust writes them: `\n`, `\u{1b}`.
pub fn escaped(text: &str) -> impl Display {
    fmt::from_fn(move |f| {
        text.chars().try_for_each(|letter| {
            if letter.is_control() { write!(f, "{}", letter.escape_default()) } else { f.write_char(letter) }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_control_characters_are_escaped() {
        let shown = escaped("größe \"a\\b\"\r\n\t\0\u{1b}[2J\u{7f}\u{9b}").to_string();
        assert_eq!(shown, "größe \"a\\b\"\\r\\n\\t\\u{0}\\u{1b}[2J\\u{7f}\\u{9b}");
    }
}
