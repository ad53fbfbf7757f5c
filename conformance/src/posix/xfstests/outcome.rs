//! What `check` prints: a line for each test, that of a failed one with indented lines below it.

use std::time::Duration;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    Passed,
    /// The suite found that something which the test needs is not there.
    NotRun,
    /// What was printed.
    Failed(String),
}

/// In the order of the run.
#[derive(Debug, Default)]
pub(super) struct Report(Vec<(String, Outcome)>);

impl Report {
    pub(super) fn read(output: &str) -> Self {
        let mut report = Self::default();
        for line in output.lines() {
            if let Some((test, rest)) = test_of(line) {
                if rest.trim() != "[expunged]" {
                    report.0.push((test.to_owned(), outcome_of(rest)));
                }
            } else if line.starts_with("    ")
                && let Some((_, Outcome::Failed(text))) = report.0.last_mut()
            {
                text.push('\n');
                text.push_str(line);
            }
        }
        report
    }

    pub(super) fn add(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// In the order of the names.
    pub(super) fn merge(reports: Vec<Self>) -> Self {
        let mut all: Vec<_> = reports.into_iter().flat_map(|report| report.0).collect();
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        Self(all)
    }

    pub(super) fn tests(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(test, _)| test.as_str())
    }

    pub(super) fn last(&self) -> Option<&str> {
        self.0.last().map(|(test, _)| test.as_str())
    }

    /// The last test did not end. Its name.
    pub(super) fn time_out(&mut self, timeout: Duration) -> Option<String> {
        let (test, outcome) = self.0.last_mut()?;
        *outcome = Outcome::Failed(format!("not within {timeout:?}"));
        Some(test.clone())
    }

    pub(super) fn outcomes(&self) -> impl Iterator<Item = (&str, &Outcome)> {
        self.0.iter().map(|(test, outcome)| (test.as_str(), outcome))
    }
}

/// `generic/001`, and the rest of a line that begins with it.
fn test_of(line: &str) -> Option<(&str, &str)> {
    let number = line.strip_prefix("generic/")?;
    let digits = number.bytes().take_while(u8::is_ascii_digit).count();
    let rest = &number[digits..];
    let is_name = digits >= 3 && (rest.is_empty() || rest.starts_with(' '));
    is_name.then(|| line.split_at("generic/".len() + digits))
}

fn outcome_of(rest: &str) -> Outcome {
    if rest.contains("[not run]") {
        return Outcome::NotRun;
    }
    // `4s`, or, if the suite knows of an earlier run, `3s ...  4s`.
    let is_time = |word: &str| word.strip_suffix('s').is_some_and(|n| n.parse::<u32>().is_ok());
    let words: Vec<&str> = rest.split_whitespace().collect();
    match words[..] {
        [time] | [_, "...", time] if is_time(time) => Outcome::Passed,
        _ => Outcome::Failed(rest.trim().to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "FSTYP         -- fuse\n\
        \n\
        generic/001         4s\n\
        generic/002 3s ...  4s\n\
        generic/003        [failed, exit status 1]- output mismatch (see /r/003.out.bad)\n\
        \x20   --- tests/generic/003.out\n\
        \x20   +cycle mount failed\n\
        generic/004        [not run] O_TMPFILE is not supported\n\
        generic/005        [expunged]\n\
        generic/006        _check_dmesg: something found in dmesg (see /r/006.dmesg)\n\
        generic/1007       ";

    #[test]
    fn each_test_is_read_with_its_outcome() {
        let mut report = Report::read(OUTPUT);
        let of = |number: usize| report.0[number].1.clone();
        let names: Vec<&str> = report.tests().collect();
        assert_eq!(
            names,
            ["generic/001", "generic/002", "generic/003", "generic/004", "generic/006", "generic/1007"]
        );
        assert_eq!((of(0), of(1), of(3)), (Outcome::Passed, Outcome::Passed, Outcome::NotRun));
        let Outcome::Failed(text) = of(2) else { panic!("{:?}", of(2)) };
        assert!(text.starts_with("[failed") && text.ends_with("+cycle mount failed"), "{text}");
        assert!(matches!(of(4), Outcome::Failed(_)));
        // Broken off.
        assert_eq!(of(5), Outcome::Failed(String::new()));
        assert_eq!(report.time_out(Duration::from_secs(9)).as_deref(), Some("generic/1007"));
        assert_eq!(report.0[5].1, Outcome::Failed("not within 9s".to_owned()));
    }

    #[test]
    fn a_summary_is_no_test() {
        assert_eq!(Report::read("Ran: generic/001\nFailures: generic/001\ngeneric/quick\n").0, []);
    }
}
