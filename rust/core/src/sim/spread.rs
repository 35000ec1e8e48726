//! Mean, percentiles and maximum of times.

/// How a time is spread, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// The arithmetic mean.
    pub mean: f64,
    /// The median.
    pub p50: f64,
    /// The 90th percentile.
    pub p90: f64,
    /// The 99th percentile.
    pub p99: f64,
    /// The largest.
    pub max: f64,
}

impl Spread {
    /// The spread of times in nanoseconds, which are reordered; `None` when there is none.
    pub fn of(times: &mut [u64]) -> Option<Self> {
        let (count, total) = (times.len() as u64, times.iter().map(|&time| u128::from(time)).sum());
        let mut sorted = 0;
        // The places come ascending: each is found among those that are not below the one before.
        let at = |place| {
            let place = usize::try_from(place).expect("a place below the count");
            if place >= sorted {
                times[sorted..].select_nth_unstable(place - sorted);
                sorted = place + 1;
            }
            times[place]
        };
        Self::sorted(count, total, at)
    }

    /// As [`Spread::of`], of ascending times each given with how often it occurs.
    pub fn of_counts(times: &[(u64, u64)]) -> Option<Self> {
        let count = times.iter().map(|&(_, times)| times).sum();
        let total = times.iter().map(|&(time, times)| u128::from(time) * u128::from(times)).sum();
        let at = |place| {
            let mut passed = 0;
            let found = times.iter().find(|&&(_, times)| {
                passed += times;
                passed > place
            });
            found.expect("a place below the count").0
        };
        Self::sorted(count, total, at)
    }

    /// The spread of `count` times that add up to `total`, where `at` gives the time at a place of their order;
    /// it is asked for ascending places.
    fn sorted(count: u64, total: u128, mut at: impl FnMut(u64) -> u64) -> Option<Self> {
        if count == 0 {
            return None;
        }
        #[allow(clippy::cast_precision_loss, reason = "rounded once, at the very end")]
        let mean = total as f64 / (count as f64 * 1e6);
        let mut order = |place| milliseconds(at(place));
        let [p50, p90, p99] = [50.0, 90.0, 99.0].map(|percent| percentile(count, percent, &mut order));
        Some(Self { mean, p50, p90, p99, max: order(count - 1) })
    }
}

/// Nanoseconds as milliseconds.
#[allow(clippy::cast_precision_loss, reason = "whole nanoseconds up to 2^53, 104 days, are exact")]
pub(super) fn milliseconds(time: u64) -> f64 {
    time as f64 / 1e6
}

/// Nanoseconds as seconds.
#[allow(clippy::cast_precision_loss, reason = "whole nanoseconds up to 2^53, 104 days, are exact")]
pub(super) fn seconds(time: u64) -> f64 {
    time as f64 / 1e9
}

/// Linear between the two neighbours, in the arithmetic of numpy's default, so that equal data give equal bits.
#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a place between 0 and count - 1"
)]
fn percentile(count: u64, percent: f64, mut order: impl FnMut(u64) -> f64) -> f64 {
    let place = (count - 1) as f64 * (percent / 100.0);
    let below = place.floor() as u64;
    let (low, high) = (order(below), order((below + 1).min(count - 1)));
    let share = place - place.floor();
    if share >= 0.5 { high - (high - low) * (1.0 - share) } else { low + (high - low) * share }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    #[allow(clippy::float_cmp, reason = "the values are exact")]
    fn percentiles_are_linear() {
        // 10, 20, 20, 20, 50: places 2, 3.6 and 3.96 of 0..=4.
        let times = [50, 20, 10, 20, 20].map(|ms| ms * MS);
        let counts = [(10 * MS, 1), (20 * MS, 3), (50 * MS, 1)];
        assert_eq!(Spread::of(&mut times.clone()), Spread::of_counts(&counts));
        let spread = Spread::of_counts(&[(10 * MS, 1), (20 * MS, 3), (50 * MS, 1)]).unwrap();
        assert_eq!((spread.mean, spread.p50, spread.max), (24.0, 20.0, 50.0));
        assert!((spread.p90 - 38.0).abs() < 1e-12 && (spread.p99 - 48.8).abs() < 1e-12, "{spread:?}");
    }

    #[test]
    #[allow(clippy::float_cmp, reason = "the values are exact")]
    fn one_value_and_none() {
        let one = Spread { mean: 7.0, p50: 7.0, p90: 7.0, p99: 7.0, max: 7.0 };
        assert_eq!(Spread::of_counts(&[(7 * MS, 1)]), Some(one));
        assert_eq!(Spread::of_counts(&[(7 * MS, 1000), (9 * MS, 0)]).unwrap().p99, 7.0);
        assert_eq!((Spread::of(&mut []), Spread::of_counts(&[])), (None, None));
        assert_eq!(Spread::of(&mut [7 * MS]), Some(one));
        assert_eq!(Spread::of_counts(&[(7 * MS, 0)]), None);
    }
}
