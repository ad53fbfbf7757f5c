//! TAP as shell scripts print it: a plan (`1..N`), and a line `ok` or `not ok` for each assertion.
//!
//! The list of expected failures names assertions by their numbers. So output whose numbers do not count upwards from 1
//! is an error.

use anyhow::{Context, Result, bail, ensure};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Passed,
    Failed,
    /// Failed, as the script itself expects (`# TODO`).
    FailedAsMarked,
    /// Not made, since what it needs is not there (`# SKIP`).
    Skipped,
}

#[derive(Debug, Default)]
pub(super) struct Output {
    /// That of number N, with its line, is at N - 1.
    assertions: Vec<(Outcome, String)>,
    planned: Option<usize>,
}

impl Output {
    pub(super) fn read(printed: &str) -> Result<Self> {
        let mut output = Self::default();
        for line in printed.lines() {
            output.add(line).with_context(|| format!("line {line:?}"))?;
        }
        let (made, planned) = (output.assertions.len(), output.planned.context("no plan")?);
        ensure!(made <= planned, "{made} assertions, and {planned} planned");
        ensure!(made > 0 || planned == 0, "none of {planned} assertions");
        Ok(output)
    }

    /// A line that is neither plan, assertion nor bail-out is a comment or a diagnostic.
    fn add(&mut self, line: &str) -> Result<()> {
        if has_prefix(line, "bail out!") {
            bail!("the script gave up");
        } else if let Some(plan) = line.strip_prefix("1..") {
            ensure!(self.planned.is_none(), "a second plan");
            let count = plan.split([' ', '\t', '#']).next().unwrap_or_default();
            self.planned = Some(count.parse().context("the plan is not a number")?);
        } else if let Some(assertion) = line.strip_prefix("not ok").filter(is_end_of_word) {
            let outcome = match self.read_number(assertion)? {
                Some(Directive::Todo) => Outcome::FailedAsMarked,
                Some(Directive::Skip) | None => Outcome::Failed,
            };
            self.assertions.push((outcome, line.to_owned()));
        } else if let Some(assertion) = line.strip_prefix("ok").filter(is_end_of_word) {
            let outcome = match self.read_number(assertion)? {
                Some(Directive::Skip) => Outcome::Skipped,
                Some(Directive::Todo) | None => Outcome::Passed,
            };
            self.assertions.push((outcome, line.to_owned()));
        }
        Ok(())
    }

    /// What is behind `ok`: checks the number, which may be absent, and reads the directive.
    fn read_number(&self, assertion: &str) -> Result<Option<Directive>> {
        let due = self.assertions.len() + 1;
        let word = assertion.split_whitespace().next().unwrap_or_default();
        if word.starts_with(|c: char| c.is_ascii_digit()) {
            let number: usize = word.parse().context("the assertion's number")?;
            ensure!(number == due, "number {number}, and {due} comes next");
        }
        Ok(Directive::of(assertion))
    }

    /// By their numbers.
    pub(super) fn outcomes(&self) -> impl Iterator<Item = (usize, Outcome)> {
        (1..).zip(&self.assertions).map(|(number, (outcome, _))| (number, *outcome))
    }

    /// The numbers of assertions that failed, each with its line.
    pub(super) fn failed(&self) -> impl Iterator<Item = (usize, &str)> {
        let numbered = (1..).zip(&self.assertions);
        let failed = numbered.filter(|(_, (outcome, _))| *outcome == Outcome::Failed);
        failed.map(|(number, (_, line))| (number, line.as_str()))
    }

    /// The script needs something that is not there, and makes no assertion (`1..0`).
    pub(super) fn is_skipped(&self) -> bool {
        self.planned == Some(0)
    }

    /// How many assertions are planned and were not made.
    pub(super) fn missing(&self) -> usize {
        self.planned.unwrap_or_default().saturating_sub(self.assertions.len())
    }
}

#[derive(Debug, Clone, Copy)]
enum Directive {
    Todo,
    Skip,
}

impl Directive {
    /// Behind the first `#` that begins a word. `\#` and `a#b` are text.
    fn of(assertion: &str) -> Option<Self> {
        let (before, directive) = assertion.split_once('#')?;
        if !before.ends_with(char::is_whitespace) {
            return Self::of(directive);
        }
        let directive = directive.trim_start();
        let is_todo = has_prefix(directive, "todo") && !directive[4..].starts_with(char::is_alphanumeric);
        if is_todo { Some(Self::Todo) } else { has_prefix(directive, "skip").then_some(Self::Skip) }
    }
}

/// In either case.
fn has_prefix(text: &str, prefix: &str) -> bool {
    text.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix))
}

fn is_end_of_word(rest: &&str) -> bool {
    rest.is_empty() || rest.starts_with(char::is_whitespace)
}

#[cfg(test)]
mod tests {
    use super::Outcome::{Failed, FailedAsMarked, Passed, Skipped};
    use super::*;

    fn read(printed: &str) -> Output {
        Output::read(printed).unwrap_or_else(|error| panic!("{printed}: {error:#}"))
    }

    fn outcomes(printed: &str) -> Vec<Outcome> {
        read(printed).outcomes().map(|(_, outcome)| outcome).collect()
    }

    fn failed(printed: &str) -> Vec<usize> {
        read(printed).failed().map(|(number, _)| number).collect()
    }

    fn error(printed: &str) -> String {
        format!("{:#}", Output::read(printed).unwrap_err())
    }

    #[test]
    fn assertions_have_the_numbers_that_the_script_printed() {
        let output = read("1..4\nok 1\nnot ok 2 - tried 'x', expected 0, got EPERM\n# 3\nnot ok 3\nok 4\n");
        let failed: Vec<_> = output.failed().collect();
        assert_eq!(failed, [(2, "not ok 2 - tried 'x', expected 0, got EPERM"), (3, "not ok 3")]);
        let outcomes: Vec<_> = output.outcomes().collect();
        assert_eq!(outcomes, [(1, Passed), (2, Failed), (3, Failed), (4, Passed)]);
        assert_eq!(output.missing(), 0);
    }

    #[test]
    fn an_assertion_without_a_number_has_the_next_one() {
        assert_eq!(failed("1..3\nok\nnot ok - no program\nok 3\n"), [2]);
    }

    #[test]
    fn a_plan_may_come_last() {
        assert_eq!(failed("ok 1\nnot ok 2\n1..2\n"), [2]);
    }

    #[test]
    fn what_a_script_marks_as_todo_is_no_failure() {
        let printed =
            "1..4\nnot ok 1 # TODO later\nok 2 # TODO later\nnot ok 3 - tried 'x' #todo\nnot ok 4\n";
        assert_eq!(outcomes(printed), [FailedAsMarked, Passed, FailedAsMarked, Failed]);
        assert_eq!(failed(printed), [4]);
    }

    #[test]
    fn a_mark_anywhere_else_hides_no_failure() {
        assert_eq!(failed("1..1\n# TODO\nnot ok 1 - tried 'a# TODO'\n"), [1]);
        assert_eq!(failed("1..1\nnot ok 1 - tried 'a \\# TODO'\n"), [1]);
        assert_eq!(failed("1..1\nnot ok 1 # TODOS\n"), [1]);
        assert_eq!(failed("1..1\nnot ok 1 # SKIP not here\n"), [1]);
        assert_eq!(failed("1..1\nnot ok 1 - tried 'a## TODO'\n"), [1]);
        assert_eq!(outcomes("1..1\n# TODO\nok 1\n"), [Passed]);
    }

    #[test]
    fn what_is_skipped_has_not_passed() {
        assert_eq!(outcomes("1..2\nok 1 # SKIP not here\nok 2\n"), [Skipped, Passed]);
        assert!(!read("1..1\nok 1 # SKIP not here\n").is_skipped());
        assert!(read("1..0 # SKIP: not here\n").is_skipped());
    }

    #[test]
    fn a_script_that_ends_before_its_plan_lacks_assertions() {
        assert_eq!(read("1..5\nok 1\nnot ok 2\n").missing(), 3);
    }

    #[test]
    fn a_plan_without_assertions_is_an_error() {
        assert_eq!(error("1..2\n"), "none of 2 assertions");
    }

    #[test]
    fn output_without_a_plan_or_beyond_it_is_an_error() {
        assert_eq!(error(""), "no plan");
        assert_eq!(error("not ok - could not find pjdfstest app\n"), "no plan");
        assert_eq!(error("1..1\nok 1\nok 2\n"), "2 assertions, and 1 planned");
        assert_eq!(error("1..0\nok 1\n"), "1 assertions, and 0 planned");
        assert_eq!(error("1..1\n1..1\nok 1\n"), "line \"1..1\": a second plan");
        assert!(error("1..many\nok 1\n").starts_with("line \"1..many\": the plan is not a number: "));
    }

    #[test]
    fn numbers_out_of_order_are_an_error() {
        assert_eq!(error("1..3\nok 1\nok 3\nok 2\n"), "line \"ok 3\": number 3, and 2 comes next");
        assert_eq!(error("1..3\nok 1\nnot ok 1\n"), "line \"not ok 1\": number 1, and 2 comes next");
        assert_eq!(error("1..3\nok 0\n"), "line \"ok 0\": number 0, and 1 comes next");
        assert!(error("1..3\nok 1x\n").starts_with("line \"ok 1x\": the assertion's number: "));
    }

    #[test]
    fn a_bail_out_is_an_error_after_any_number_of_assertions() {
        assert_eq!(error("1..1\nok 1\nBail out!\n"), "line \"Bail out!\": the script gave up");
        assert_eq!(error("Bail out! no time\n"), "line \"Bail out! no time\": the script gave up");
    }

    #[test]
    fn other_words_are_no_assertions() {
        assert_eq!(outcomes("1..1\nokay 2\nnot okay\n  not ok 3\nok 1\n"), [Passed]);
    }
}
