//! What libtest prints: counts, and the names of failed tests.

/// Sums over all test binaries.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    pub passed: usize,
    pub failed: usize,
    pub ignored: usize,
}

impl Counts {
    /// Adds a line such as `test result: ok. 4 passed; 0 failed; 0 ignored; 0 measured; ...`.
    pub fn add(&mut self, line: &str) {
        let Some((_, counts)) = line.strip_prefix("test result: ").and_then(|rest| rest.split_once(". "))
        else {
            return;
        };
        for part in counts.split("; ") {
            match part.split_once(' ').map(|(number, word)| (number.parse::<usize>(), word)) {
                Some((Ok(number), "passed")) => self.passed += number,
                Some((Ok(number), "failed")) => self.failed += number,
                Some((Ok(number), "ignored")) => self.ignored += number,
                _ => {}
            }
        }
    }
}

/// The name in `test a::b ... FAILED`.
pub fn failed_test(line: &str) -> Option<&str> {
    line.strip_prefix("test ")?.strip_suffix(" ... FAILED")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_summed_over_test_binaries() {
        let mut counts = Counts::default();
        for line in [
            "running 4 tests",
            "test result: ok. 4 passed; 0 failed; 0 ignored; 0 measured; 2 filtered out; finished in 0.03s",
            "test result: FAILED. 3 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out; finished in 30.61s",
        ] {
            counts.add(line);
        }
        assert_eq!(counts, Counts { passed: 7, failed: 1, ignored: 2 });
    }

    #[test]
    fn a_failed_test_is_named() {
        assert_eq!(failed_test("test tests::a_b ... FAILED"), Some("tests::a_b"));
        assert_eq!(failed_test("test tests::a_b ... ok"), None);
    }
}
