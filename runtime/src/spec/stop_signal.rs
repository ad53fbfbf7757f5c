//! The signal that stops a container: its name in requests and images, and its number.

use std::str::FromStr;

use proto::cri::{ContainerConfig, Signal as CriSignal};
use proto::signals;

use crate::error::{Error, Result};

/// SIGRTMIN as glibc and musl programs see it.
const SIGRTMIN: i32 = 34;
const SIGRTMAX: i32 = 64;

/// The stop signal: the request's, the image's, or SIGTERM.
pub(crate) fn stop_signal(config: &ContainerConfig, image: &str) -> Result<i32> {
    let requested = signals::name(config.stop_signal()).unwrap_or_else(|| image.to_owned());
    if requested.is_empty() {
        return Ok(libc::SIGTERM);
    }
    signal_number(&requested)
        .ok_or_else(|| Error::invalid("stop_signal", format!("{requested:?} is no signal")))
}

/// The CRI name of a signal.
pub(crate) fn cri_signal(number: i32) -> CriSignal {
    let name = match nix::sys::signal::Signal::try_from(number) {
        Ok(signal) => signal.as_str().to_owned(),
        Err(_) if number == SIGRTMIN => "SIGRTMIN".to_owned(),
        Err(_) if number == SIGRTMAX => "SIGRTMAX".to_owned(),
        Err(_) if number < SIGRTMIN + 16 => format!("SIGRTMIN+{}", number - SIGRTMIN),
        Err(_) => format!("SIGRTMAX-{}", SIGRTMAX - number),
    };
    signals::parse(&name).unwrap_or_default()
}

/// `15`, `TERM`, `SIGTERM`, `SIGRTMIN+3`.
fn signal_number(name: &str) -> Option<i32> {
    if let Ok(number) = name.parse() {
        return (1..=SIGRTMAX).contains(&number).then_some(number);
    }
    let upper = name.to_ascii_uppercase();
    let short = upper.strip_prefix("SIG").unwrap_or(&upper);
    let real_time = |base: i32, rest: &str| {
        let offset: i32 = if rest.is_empty() { 0 } else { rest.parse().ok()? };
        Some(base + offset).filter(|n| (SIGRTMIN..=SIGRTMAX).contains(n))
    };
    match short {
        "CLD" => return Some(libc::SIGCHLD),
        "POLL" => return Some(libc::SIGIO),
        _ => {}
    }
    if let Some(rest) = short.strip_prefix("RTMIN") {
        return real_time(SIGRTMIN, rest);
    }
    if let Some(rest) = short.strip_prefix("RTMAX") {
        return real_time(SIGRTMAX, rest);
    }
    nix::sys::signal::Signal::from_str(&format!("SIG{short}")).ok().map(|s| s as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_known_by_every_usual_name() {
        assert_eq!(signal_number("SIGTERM"), Some(15));
        assert_eq!(signal_number("quit"), Some(3));
        assert_eq!(signal_number("9"), Some(9));
        assert_eq!(signal_number("SIGRTMIN+3"), Some(37));
        assert_eq!(signal_number("SIGRTMAX-1"), Some(63));
        assert_eq!(signal_number("SIGWHAT"), None);
        assert_eq!(signal_number("99"), None);
    }

    #[test]
    fn every_signal_has_its_cri_name() {
        for number in (1..32).chain(SIGRTMIN..=SIGRTMAX) {
            let config = ContainerConfig { stop_signal: cri_signal(number).into(), ..Default::default() };
            assert_eq!(stop_signal(&config, "").unwrap(), number);
        }
        assert_eq!(cri_signal(SIGRTMIN + 3), CriSignal::Sigrtminplus3);
        assert_eq!(cri_signal(SIGRTMAX - 14), CriSignal::Sigrtmaxminus14);
    }

    #[test]
    fn the_requests_signal_wins_over_the_images() {
        let config = ContainerConfig { stop_signal: CriSignal::Sigrtminplus3.into(), ..Default::default() };
        assert_eq!(stop_signal(&config, "SIGQUIT").unwrap(), 37);
        assert_eq!(stop_signal(&ContainerConfig::default(), "SIGQUIT").unwrap(), 3);
        assert_eq!(stop_signal(&ContainerConfig::default(), "").unwrap(), 15);
    }
}
