//! What a template finds in a value.

use std::cmp::Ordering;

use serde_json::Value;

use super::{Error, Filter, Operand, Operator, Part, Step, text};

/// Values that are looked at.
const STEPS: usize = 5_000_000;
/// Bytes that are written.
const BYTES: usize = 64 << 20;

/// What is left of the limits.
#[derive(Debug)]
pub(super) struct Budget {
    steps: usize,
}

impl Default for Budget {
    fn default() -> Self {
        Self { steps: STEPS }
    }
}

impl Budget {
    fn take(&mut self, steps: usize) -> Result<(), Error> {
        self.steps = self.steps.checked_sub(steps).ok_or(Error::TooMuch("5,000,000 values"))?;
        Ok(())
    }
}

pub(super) fn render(
    parts: &[Part],
    root: &Value,
    current: &Value,
    budget: &mut Budget,
    out: &mut String,
) -> Result<(), Error> {
    for part in parts {
        budget.take(1)?;
        match part {
            Part::Text(text) => out.push_str(text),
            Part::Path(path) => {
                for (at, value) in find(path, root, current, budget)?.into_iter().enumerate() {
                    if at > 0 {
                        out.push(' ');
                    }
                    out.push_str(&text(value));
                    if out.len() > BYTES {
                        return Err(Error::TooMuch("64 MiB"));
                    }
                }
            }
            Part::Range { over, body } => {
                for value in find(over, root, current, budget)? {
                    render(body, root, value, budget, out)?;
                }
            }
        }
        if out.len() > BYTES {
            return Err(Error::TooMuch("64 MiB"));
        }
    }
    Ok(())
}

pub(super) fn find<'v>(
    path: &[Step],
    root: &'v Value,
    current: &'v Value,
    budget: &mut Budget,
) -> Result<Vec<&'v Value>, Error> {
    let mut found = vec![current];
    for step in path {
        found = advance(step, root, &found, budget)?;
    }
    Ok(found)
}

fn advance<'v>(
    step: &Step,
    root: &'v Value,
    from: &[&'v Value],
    budget: &mut Budget,
) -> Result<Vec<&'v Value>, Error> {
    budget.take(from.len())?;
    let mut found = Vec::new();
    match step {
        Step::Root => found.push(root),
        Step::Field(name) => found.extend(from.iter().filter_map(|value| field(value, name))),
        Step::Descendants => {
            for value in from {
                descend(value, budget, &mut found)?;
            }
        }
        Step::All => {
            for value in from {
                let before = found.len();
                found.extend(children(value));
                budget.take(found.len() - before)?;
            }
        }
        Step::Index(index) => {
            for value in from {
                let Value::Array(items) = value else { continue };
                let length = items.len();
                let at = place(*index, length).and_then(|at| items.get(at));
                found.push(at.ok_or(Error::OutOfBounds { index: *index, length })?);
            }
        }
        Step::Slice { from: first, to, step } => {
            for value in from {
                let Value::Array(items) = value else { continue };
                let place = |index: Option<i64>, default| {
                    index.map_or(default, |index| place(index, items.len()).unwrap_or(0).min(items.len()))
                };
                let (first, end) = (place(*first, 0), place(*to, items.len()));
                let chosen = items[first..end.max(first)].iter().step_by(*step);
                budget.take(chosen.len())?;
                found.extend(chosen);
            }
        }
        Step::Union(paths) => {
            for path in paths {
                for value in from {
                    let chosen = find(path, root, value, budget)?;
                    budget.take(chosen.len())?;
                    found.extend(chosen);
                }
            }
        }
        Step::Filter(filter) => {
            for value in from {
                for item in children(value) {
                    budget.take(1)?;
                    if holds(filter, root, item, budget)? {
                        found.push(item);
                    }
                }
            }
        }
    }
    Ok(found)
}

/// The field as a whole, or the way that the dots in its name describe.
fn field<'v>(value: &'v Value, name: &str) -> Option<&'v Value> {
    if let Some(found) = value.get(name) {
        return Some(found);
    }
    let (first, rest) = name.split_once('.')?;
    field(value.get(first)?, rest)
}

fn children(value: &Value) -> Box<dyn Iterator<Item = &Value> + '_> {
    match value {
        Value::Array(items) => Box::new(items.iter()),
        Value::Object(fields) => Box::new(fields.values()),
        _ => Box::new(std::iter::empty()),
    }
}

/// The value and all collections in it. JSON that serde_json has read is at most 128 levels deep.
fn descend<'v>(value: &'v Value, budget: &mut Budget, found: &mut Vec<&'v Value>) -> Result<(), Error> {
    budget.take(1)?;
    if value.is_array() || value.is_object() {
        found.push(value);
        children(value).try_for_each(|child| descend(child, budget, found))?;
    }
    Ok(())
}

/// The place of `index` in a list; `None`: before its begin.
fn place(index: i64, length: usize) -> Option<usize> {
    let distance = usize::try_from(index.unsigned_abs()).unwrap_or(usize::MAX);
    if index < 0 { length.checked_sub(distance) } else { Some(distance) }
}

fn holds(filter: &Filter, root: &Value, item: &Value, budget: &mut Budget) -> Result<bool, Error> {
    let left = operand(&filter.left, root, item, budget)?;
    let Some((operator, right)) = &filter.compared else { return Ok(!left.is_empty()) };
    let right = operand(right, root, item, budget)?;
    match (left.as_slice(), right.as_slice()) {
        ([], _) | (_, []) => Ok(false),
        ([left], [right]) => Ok(compare(left, *operator, right)),
        _ => Err(Error::Comparison),
    }
}

fn operand<'v>(
    operand: &'v Operand,
    root: &'v Value,
    item: &'v Value,
    budget: &mut Budget,
) -> Result<Vec<&'v Value>, Error> {
    match operand {
        Operand::Path(path) => find(path, root, item, budget),
        Operand::Constant(value) => Ok(vec![value]),
    }
}

/// Values of two types are not equal, and none of them is less.
fn compare(left: &Value, operator: Operator, right: &Value) -> bool {
    let order = match (left, right) {
        (Value::Number(left), Value::Number(right)) => match (left.as_i64(), right.as_i64()) {
            (Some(left), Some(right)) => Some(left.cmp(&right)),
            _ => left.as_f64().zip(right.as_f64()).and_then(|(left, right)| left.partial_cmp(&right)),
        },
        (Value::String(left), Value::String(right)) => Some(left.cmp(right)),
        (Value::Bool(left), Value::Bool(right)) => Some(left.cmp(right)),
        (left, right) => (left == right).then_some(Ordering::Equal),
    };
    match operator {
        Operator::Equal => order == Some(Ordering::Equal),
        Operator::NotEqual => order != Some(Ordering::Equal),
        Operator::Less => order == Some(Ordering::Less),
        Operator::LessOrEqual => matches!(order, Some(Ordering::Less | Ordering::Equal)),
        Operator::Greater => order == Some(Ordering::Greater),
        Operator::GreaterOrEqual => matches!(order, Some(Ordering::Greater | Ordering::Equal)),
    }
}
