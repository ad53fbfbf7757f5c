//! CRI's signals, by the names of signal(7), which Kubernetes and images use.

use crate::cri::Signal;

const PREFIX: &str = "SIGNAL_";

/// The signal with this name, such as `SIGUSR1` or `SIGRTMIN+3`.
pub fn parse(name: &str) -> Option<Signal> {
    let cri = name.replace("MIN+", "MINPLUS").replace("MAX-", "MAXMINUS");
    let signal = Signal::from_str_name(&format!("{PREFIX}{cri}"))?;
    (self::name(signal).as_deref() == Some(name)).then_some(signal)
}

/// `None` for the runtime's default.
pub fn name(signal: Signal) -> Option<String> {
    let name = signal.as_str_name().strip_prefix(PREFIX)?;
    (signal != Signal::RuntimeDefault).then(|| name.replace("MINPLUS", "MIN+").replace("MAXMINUS", "MAX-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_the_names_of_kubernetes() {
        for (name, signal) in [
            ("SIGUSR1", Signal::Sigusr1),
            ("SIGRTMIN", Signal::Sigrtmin),
            ("SIGRTMIN+3", Signal::Sigrtminplus3),
            ("SIGRTMAX-14", Signal::Sigrtmaxminus14),
        ] {
            assert_eq!((parse(name), self::name(signal).as_deref()), (Some(signal), Some(name)));
        }
        for wrong in ["", "USR1", "sigusr1", "SIGRTMINPLUS3", "SIGRTMIN+16", "RUNTIME_DEFAULT", "10"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
        assert_eq!(name(Signal::RuntimeDefault), None);
    }
}
