//! Durations as kubectl prints them: `45s`, `5m3s`, `3d4h`.

use crate::objects::{Event, Time};

/// The age, or `<unknown>` without a time.
pub(super) fn since(then: Option<Time>, now: Time) -> String {
    then.map_or_else(|| "<unknown>".to_owned(), |then| human(now.as_second() - then.as_second()))
}

/// `3s`, or `3s (x5 over 2m)` for a repeated event.
pub(super) fn of_event(event: &Event, now: Time) -> String {
    let last = since(Some(event.last_timestamp), now);
    match event.count {
        0 | 1 => last,
        count => format!("{last} (x{count} over {})", since(Some(event.first_timestamp), now)),
    }
}

/// Prints two units while the larger one is small.
pub(super) fn human(seconds: i64) -> String {
    let seconds = seconds.max(0);
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match () {
        () if seconds < 120 => format!("{seconds}s"),
        () if minutes < 10 => two(minutes, 'm', seconds % 60, 's'),
        () if minutes < 180 => format!("{minutes}m"),
        () if hours < 8 => two(hours, 'h', minutes % 60, 'm'),
        () if hours < 48 => format!("{hours}h"),
        () if days < 8 => two(days, 'd', hours % 24, 'h'),
        () if days < 2 * 365 => format!("{days}d"),
        () if days < 8 * 365 => two(days / 365, 'y', days % 365, 'd'),
        () => format!("{}y", days / 365),
    }
}

fn two(large: i64, large_unit: char, small: i64, small_unit: char) -> String {
    match small {
        0 => format!("{large}{large_unit}"),
        small => format!("{large}{large_unit}{small}{small_unit}"),
    }
}

#[cfg(test)]
mod tests {
    use super::human;

    #[test]
    fn ages_read_like_kubectls() {
        let cases = [
            (-5, "0s"),
            (119, "119s"),
            (120, "2m"),
            (185, "3m5s"),
            (600, "10m"),
            (10_740, "179m"),
            (10_800, "3h"),
            (14_700, "4h5m"),
            (86_400, "24h"),
            (172_800, "2d"),
            (190_800, "2d5h"),
            (864_000, "10d"),
            (63_072_000, "2y"),
            (63_158_400, "2y1d"),
        ];
        for (seconds, text) in cases {
            assert_eq!(human(seconds), text, "{seconds} s");
        }
    }
}
