//! What eviction watches, and the flags that set its thresholds, in kubelet's syntax
//! (kubernetes, pkg/kubelet/eviction/helpers.go: ParseThresholdConfig). No I/O.

use std::fmt;
use std::time::Duration;

use super::Condition;
use crate::command_line::durations;
use crate::objects::Quantity;

/// In the order in which they are looked after: memory first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Signal {
    MemoryAvailable,
    NodefsAvailable,
    NodefsInodesFree,
    ImagefsAvailable,
    ImagefsInodesFree,
    PidAvailable,
}

impl Signal {
    const ALL: [Self; 6] = [
        Self::MemoryAvailable,
        Self::NodefsAvailable,
        Self::NodefsInodesFree,
        Self::ImagefsAvailable,
        Self::ImagefsInodesFree,
        Self::PidAvailable,
    ];

    fn as_str(self) -> &'static str {
        match self {
            Self::MemoryAvailable => "memory.available",
            Self::NodefsAvailable => "nodefs.available",
            Self::NodefsInodesFree => "nodefs.inodesFree",
            Self::ImagefsAvailable => "imagefs.available",
            Self::ImagefsInodesFree => "imagefs.inodesFree",
            Self::PidAvailable => "pid.available",
        }
    }

    pub(crate) fn condition(self) -> Condition {
        match self {
            Self::MemoryAvailable => Condition::Memory,
            Self::NodefsAvailable
            | Self::NodefsInodesFree
            | Self::ImagefsAvailable
            | Self::ImagefsInodesFree => Condition::Disk,
            Self::PidAvailable => Condition::Pid,
        }
    }

    /// Whether it is about the disk of images and layers.
    pub(crate) fn is_of_images(self) -> bool {
        matches!(self, Self::ImagefsAvailable | Self::ImagefsInodesFree)
    }

    /// As in kubelet's messages.
    pub(crate) fn resource(self) -> &'static str {
        match self {
            Self::MemoryAvailable => "memory",
            Self::NodefsAvailable | Self::ImagefsAvailable => "ephemeral-storage",
            Self::NodefsInodesFree | Self::ImagefsInodesFree => "inodes",
            Self::PidAvailable => "pids",
        }
    }

    /// An amount in the messages: bytes, or a number.
    pub(crate) fn shown(self, amount: u64) -> String {
        match self {
            Self::MemoryAvailable | Self::NodefsAvailable | Self::ImagefsAvailable => {
                // kubelet rounds bytes to Ki.
                Quantity::from_bytes(if amount < 1024 { amount } else { amount & !1023 }).to_string()
            }
            Self::NodefsInodesFree | Self::ImagefsInodesFree | Self::PidAvailable => amount.to_string(),
        }
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A part of what there is, or an amount.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Amount {
    Absolute(u64),
    /// Millionths of the capacity.
    Share(u64),
}

/// Below this, pods are evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Threshold {
    pub(crate) signal: Signal,
    amount: Amount,
    /// How long it must be met; zero for a hard one.
    pub(crate) grace: Duration,
}

impl Threshold {
    /// The amount, for a capacity.
    pub(crate) fn amount(&self, capacity: u64) -> u64 {
        match self.amount {
            Amount::Absolute(amount) => amount,
            Amount::Share(millionths) => {
                let amount = u128::from(capacity) * u128::from(millionths) / 1_000_000;
                u64::try_from(amount).unwrap_or(u64::MAX)
            }
        }
    }
}

/// The value of `--eviction-hard` or `--eviction-soft`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Thresholds(pub(crate) Vec<Threshold>);

impl Thresholds {
    /// `memory.available<100Mi,nodefs.available<10%`; none if empty.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut all: Vec<Threshold> = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (signal, amount) =
                part.split_once('<').ok_or_else(|| format!("{part:?}: want SIGNAL<AMOUNT"))?;
            let signal = signal_named(signal)?;
            if all.iter().any(|known| known.signal == signal) {
                return Err(format!("{signal} comes twice"));
            }
            let Some(amount) = amount_of(amount)? else { continue };
            all.push(Threshold { signal, amount, grace: Duration::ZERO });
        }
        Ok(Self(all))
    }

    /// Gives each its grace period; one without is an error, as with kubelet.
    pub fn with_grace(mut self, periods: &GracePeriods) -> Result<Self, String> {
        for threshold in &mut self.0 {
            let found = periods.0.iter().find(|(signal, _)| *signal == threshold.signal);
            let (_, grace) = found.ok_or_else(|| {
                format!("grace period must be specified for the soft eviction threshold {}", threshold.signal)
            })?;
            threshold.grace = *grace;
        }
        Ok(self)
    }

    pub fn and(mut self, others: Self) -> Self {
        self.0.extend(others.0);
        self
    }
}

/// `--eviction-hard`, `--eviction-soft` and `--eviction-pressure-transition-period`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PressureLimits {
    pub thresholds: Thresholds,
    /// How long the node keeps a condition that no longer holds.
    pub transition: Duration,
}

/// The value of `--eviction-soft-grace-period`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GracePeriods(Vec<(Signal, Duration)>);

impl GracePeriods {
    /// `memory.available=1m30s,nodefs.available=2m`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut all = Vec::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (signal, period) =
                part.split_once('=').ok_or_else(|| format!("{part:?}: want SIGNAL=DURATION"))?;
            all.push((signal_named(signal)?, durations::not_negative(period)?));
        }
        Ok(Self(all))
    }
}

fn signal_named(name: &str) -> Result<Signal, String> {
    Signal::ALL.into_iter().find(|signal| signal.as_str() == name).ok_or_else(|| {
        let names = Signal::ALL.map(Signal::as_str).join(", ");
        format!("unknown signal {name:?}: want one of {names}")
    })
}

/// `None` for 0 % and 100 %, which kubelet takes as no threshold.
fn amount_of(text: &str) -> Result<Option<Amount>, String> {
    if let Some(percent) = text.strip_suffix('%') {
        let percent: f64 = percent.parse().map_err(|e| format!("{text:?}: {e}"))?;
        if !(0.0..=100.0).contains(&percent) {
            return Err(format!("{text:?}: want 0% to 100%"));
        }
        if percent == 0.0 || percent == 100.0 {
            return Ok(None);
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 1,000,000")]
        let millionths = (percent * 10_000.0).round() as u64;
        return Ok(Some(Amount::Share(millionths)));
    }
    let quantity: Quantity = text.parse().map_err(|e: crate::objects::QuantityError| e.to_string())?;
    if quantity.is_negative() || quantity.value() == 0 {
        return Err(format!("{text:?}: must be positive"));
    }
    Ok(Some(Amount::Absolute(quantity.value())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_are_read_as_kubelet_reads_them() {
        let found =
            Thresholds::parse("memory.available<100Mi,nodefs.available<10%,imagefs.inodesFree<0%").unwrap();
        let amounts: Vec<(Signal, u64)> = found.0.iter().map(|t| (t.signal, t.amount(1000))).collect();
        assert_eq!(amounts, [(Signal::MemoryAvailable, 100 << 20), (Signal::NodefsAvailable, 100)]);
        assert_eq!(Thresholds::parse("").unwrap(), Thresholds::default());
        assert_eq!(Thresholds::parse("nodefs.available<2.5%").unwrap().0[0].amount(1000), 25);
        for (text, said) in [
            ("memory.available", "want SIGNAL<AMOUNT"),
            ("memory.free<1Mi", "unknown signal \"memory.free\": want one of memory.available, "),
            ("memory.available<1x", "1x"),
            ("memory.available<101%", "want 0% to 100%"),
            ("memory.available<-1", "must be positive"),
            ("pid.available<1,pid.available<2", "pid.available comes twice"),
        ] {
            let error = Thresholds::parse(text).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }

    #[test]
    fn a_soft_threshold_has_a_grace_period() {
        let soft = Thresholds::parse("memory.available<1Gi").unwrap();
        let periods = GracePeriods::parse("memory.available=1m30s").unwrap();
        let both = soft.clone().with_grace(&periods).unwrap();
        assert_eq!(both.0[0].grace, Duration::from_secs(90));
        let error = soft.with_grace(&GracePeriods::default()).unwrap_err();
        assert_eq!(error, "grace period must be specified for the soft eviction threshold memory.available");
    }
}
