//! How many requests a volume's daemon has answered, by its metrics (docs/METRICS.md).

use std::collections::BTreeMap;

/// The number of answers to each operation in a page of metrics, with the failed ones. FORGET has no answer.
pub fn operations(page: &str) -> BTreeMap<String, u64> {
    let answers = page.lines().filter_map(|line| {
        let (operation, rest) =
            line.strip_prefix("hawser_volume_operations_total{operation=\"")?.split_once('"')?;
        let (_result, number) = rest.rsplit_once(' ')?;
        Some((operation, number.parse::<u64>().ok()?))
    });
    let mut found = BTreeMap::new();
    for (operation, number) in answers {
        *found.entry(operation.to_owned()).or_default() += number;
    }
    found
}

/// What was answered since `before`.
pub fn since(before: &BTreeMap<String, u64>, now: BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let new = now.into_iter().map(|(name, number)| {
        let earlier = before.get(&name).copied().unwrap_or_default();
        (name, number - earlier)
    });
    new.filter(|(_, number)| *number > 0).collect()
}
