//! Mean, percentiles and maximum of a set of times.

/// Mean, percentiles and maximum of a set of times, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Distribution {
    /// Arithmetic mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Maximum.
    pub max: f64,
}

impl Distribution {
    /// Return the distribution of times in nanoseconds, which are reordered; `None` if there are none.
    pub fn of(times: &mut [u64]) -> Option<Self> {
        let (count, total) = (times.len() as u64, times.iter().map(|&time| u128::from(time)).sum());
        let mut sorted = 0;
        // Ranks are requested in ascending order, so that a selection needs to look only beyond the last one.
        let at = |rank| {
            let rank = usize::try_from(rank).expect("a rank below the count");
            if rank >= sorted {
                times[sorted..].select_nth_unstable(rank - sorted);
                sorted = rank + 1;
            }
            times[rank]
        };
        Self::sorted(count, total, at)
    }

    /// Return the distribution of ascending times in nanoseconds, each with its number of occurrences; `None` if there
    /// are none.
    pub fn of_counts(times: &[(u64, u64)]) -> Option<Self> {
        let count = times.iter().map(|&(_, times)| times).sum();
        let total = times.iter().map(|&(time, times)| u128::from(time) * u128::from(times)).sum();
        let at = |rank| {
            let mut passed = 0;
            let found = times.iter().find(|&&(_, times)| {
                passed += times;
                passed > rank
            });
            found.expect("a rank below the count").0
        };
        Self::sorted(count, total, at)
    }

    /// Return the distribution of `count` times with the sum `total`. `at` returns the time of a rank, from 0 in
    /// ascending order; it is called with ascending ranks.
    fn sorted(count: u64, total: u128, mut at: impl FnMut(u64) -> u64) -> Option<Self> {
        if count == 0 {
            return None;
        }
        #[allow(clippy::cast_precision_loss, reason = "an integer sum, rounded once in the division")]
        let mean = total as f64 / (count as f64 * 1e6);
        let mut order = |rank| milliseconds(at(rank));
        let [p50, p90, p99] = [50.0, 90.0, 99.0].map(|percent| percentile(count, percent, &mut order));
        Some(Self { mean, p50, p90, p99, max: order(count - 1) })
    }
}

/// Convert nanoseconds to milliseconds.
#[allow(clippy::cast_precision_loss, reason = "whole nanoseconds up to 2^53, 104 days, are exact")]
pub(super) fn milliseconds(time: u64) -> f64 {
    time as f64 / 1e6
}

/// Convert nanoseconds to seconds.
#[allow(clippy::cast_precision_loss, reason = "whole nanoseconds up to 2^53, 104 days, are exact")]
pub(super) fn seconds(time: u64) -> f64 {
    time as f64 / 1e9
}

/// Return a percentile by linear interpolation between the two nearest ranks. The operations are those of numpy's
/// default method, so that equal data give equal bits.
#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rank between 0 and count - 1"
)]
fn percentile(count: u64, percent: f64, mut order: impl FnMut(u64) -> f64) -> f64 {
    let rank = (count - 1) as f64 * (percent / 100.0);
    let below = rank.floor() as u64;
    let (low, high) = (order(below), order((below + 1).min(count - 1)));
    let share = rank - rank.floor();
    if share >= 0.5 { high - (high - low) * (1.0 - share) } else { low + (high - low) * share }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    #[allow(clippy::float_cmp, reason = "the values are exact")]
    fn percentiles_are_interpolated_linearly() {
        // 10, 20, 20, 20, 50: ranks 2, 3.6 and 3.96 of 0..=4.
        let times = [50, 20, 10, 20, 20].map(|ms| ms * MS);
        let counts = [(10 * MS, 1), (20 * MS, 3), (50 * MS, 1)];
        assert_eq!(Distribution::of(&mut times.clone()), Distribution::of_counts(&counts));
        let found = Distribution::of_counts(&[(10 * MS, 1), (20 * MS, 3), (50 * MS, 1)]).unwrap();
        assert_eq!((found.mean, found.p50, found.max), (24.0, 20.0, 50.0));
        assert!((found.p90 - 38.0).abs() < 1e-12 && (found.p99 - 48.8).abs() < 1e-12, "{found:?}");
    }

    #[test]
    #[allow(clippy::float_cmp, reason = "the values are exact")]
    fn one_value_is_every_percentile_and_no_value_is_none() {
        let one = Distribution { mean: 7.0, p50: 7.0, p90: 7.0, p99: 7.0, max: 7.0 };
        assert_eq!(Distribution::of_counts(&[(7 * MS, 1)]), Some(one));
        assert_eq!(Distribution::of_counts(&[(7 * MS, 1000), (9 * MS, 0)]).unwrap().p99, 7.0);
        assert_eq!((Distribution::of(&mut []), Distribution::of_counts(&[])), (None, None));
        assert_eq!(Distribution::of(&mut [7 * MS]), Some(one));
        assert_eq!(Distribution::of_counts(&[(7 * MS, 0)]), None);
    }
}
