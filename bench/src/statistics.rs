//! What a bench prints of its samples.

/// Sorts; the middle one, or the mean of the middle two.
pub(super) fn median(samples: &mut [f64]) -> f64 {
    samples.sort_by(f64::total_cmp);
    match samples.len() {
        0 => 0.0,
        count if count % 2 == 1 => samples[count / 2],
        count => f64::midpoint(samples[count / 2 - 1], samples[count / 2]),
    }
}

/// The smallest sample that so many percent are not above.
pub(super) fn percentile(samples: &[f64], percent: usize) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[(sorted.len() * percent).div_ceil(100).saturating_sub(1)]
}

/// Sorts; the first and the last quartile.
pub(super) fn spread(samples: &mut [f64]) -> (f64, f64) {
    samples.sort_by(f64::total_cmp);
    let at = |quarters: usize| samples.get(samples.len() * quarters / 4).copied().unwrap_or(0.0);
    (at(1), at(3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_lies_between_the_middle_two() {
        assert!((median(&mut [100.0, 2.0, 1.0, 4.0]) - 3.0).abs() < f64::EPSILON);
        assert!((median(&mut [2.0, 100.0, 1.0]) - 2.0).abs() < f64::EPSILON);
    }

    #[test]
    fn the_spread_leaves_a_quarter_out_on_each_side() {
        assert_eq!(spread(&mut [5.0, 1.0, 2.0, 4.0, 3.0]), (2.0, 4.0));
        assert_eq!(spread(&mut []), (0.0, 0.0));
    }
}
