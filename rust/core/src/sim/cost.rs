//! Duration of a step on the device: measured points with linear interpolation.

use crate::config::TOKENS_MAX;
use crate::error::{Error, Fault};

/// Durations of steps by padded size, in nanoseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cost {
    prefill: Curve,
    decode: Curve,
}

impl Cost {
    /// Return a cost where every prefill step takes `prefill` and every decode step takes `decode` nanoseconds.
    pub fn constant(prefill: u64, decode: u64) -> Self {
        Self { prefill: Curve::constant(prefill), decode: Curve::constant(decode) }
    }

    /// Return a cost from measured points: prefill durations by padded tokens, decode durations by padded rows. The
    /// error lists the faults of both tables.
    pub fn table(prefill: &[(i64, u64)], decode: &[(i64, u64)]) -> Result<Self, Error> {
        match (Curve::new("prefill", prefill), Curve::new("decode", decode)) {
            (Ok(prefill), Ok(decode)) => Ok(Self { prefill, decode }),
            (prefill, decode) => Err(Error::Invalid(prefill.err().into_iter().chain(decode.err()).collect())),
        }
    }

    /// Return the duration of a prefill step padded to `tokens`.
    pub fn prefill(&self, tokens: u32) -> u64 {
        self.prefill.at(tokens)
    }

    /// Return the duration of a decode step padded to `rows`.
    pub fn decode(&self, rows: u32) -> u64 {
        self.decode.at(rows)
    }
}

/// A piecewise linear function through at least one point, sizes ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Curve {
    points: Box<[(u32, u64)]>,
}

impl Curve {
    fn constant(value: u64) -> Self {
        Self { points: [(1, value)].into() }
    }

    fn new(field: &'static str, points: &[(i64, u64)]) -> Result<Self, Fault> {
        if points.is_empty() {
            return Err(Fault::new(field, "no points", "at least one point"));
        }
        let mut checked = Vec::with_capacity(points.len());
        for &(size, value) in points {
            match u32::try_from(size) {
                Ok(size @ 1..=TOKENS_MAX) => checked.push((size, value)),
                _ => return Err(Fault::new(field, size, format!("sizes from 1 to {TOKENS_MAX}"))),
            }
        }
        checked.sort_unstable();
        match checked.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            Some(pair) => Err(Fault::new(field, pair[0].0, "each size once")),
            None => Ok(Self { points: checked.into() }),
        }
    }

    /// Return the value at `size`: interpolated between the neighbouring points and rounded half up; extrapolated from
    /// the last two points beyond the last point, but at least 0; the first value below the first point.
    fn at(&self, size: u32) -> u64 {
        let above = self.points.partition_point(|&(point, _)| point < size);
        let (first, value) = self.points[above.min(self.points.len() - 1)];
        if above == 0 || first == size || self.points.len() == 1 {
            return value;
        }
        let right = above.min(self.points.len() - 1);
        let ((left_size, left), (right_size, right)) = (self.points[right - 1], self.points[right]);
        let width = i128::from(right_size - left_size);
        let rise = (i128::from(right) - i128::from(left)) * i128::from(size - left_size);
        let twice = 2 * (i128::from(left) * width + rise) + width;
        u64::try_from(twice.div_euclid(2 * width).max(0)).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_hold_for_every_size() {
        let cost = Cost::constant(100, 10);
        assert_eq!([cost.prefill(1), cost.prefill(8192), cost.decode(1), cost.decode(96)], [100, 100, 10, 10]);
    }

    #[test]
    fn values_are_interpolated_and_extrapolated() {
        let cost = Cost::table(&[(1024, 500), (128, 100), (256, 180)], &[(4, 10), (8, 11)]).unwrap();
        let prefill = [1, 128, 129, 192, 256, 640, 1024, 2048].map(|tokens| cost.prefill(tokens));
        // 100 + 80/128 = 100.625; 500 + 1024 * 320/768 = 926.67
        assert_eq!(prefill, [100, 100, 101, 140, 180, 340, 500, 927]);
        // 10.25, 10.5 (rounded half up), 10.75; beyond the last point, 0.25 per row
        assert_eq!([5, 6, 7, 8, 9, 10].map(|rows| cost.decode(rows)), [10, 11, 11, 11, 11, 12]);
    }

    #[test]
    fn an_extrapolated_value_is_at_least_zero() {
        let cost = Cost::table(&[(1, 100), (2, 99), (4, 50)], &[(1, 1)]).unwrap();
        assert_eq!([3, 4, 5, 6, 100].map(|tokens| cost.prefill(tokens)), [75, 50, 26, 1, 0]);
        let steep = Cost::table(&[(1, 0), (2, u64::MAX)], &[(1, 1)]).unwrap();
        assert_eq!(steep.prefill(TOKENS_MAX), u64::MAX);
    }

    #[test]
    fn the_error_lists_the_faults_of_both_tables() {
        let error = Cost::table(&[], &[(8, 1), (8, 2)]).unwrap_err().to_string();
        assert_eq!(error, "prefill: no points: expected at least one point\ndecode: 8: expected each size once");
        assert!(Cost::table(&[(0, 1)], &[(1, 1)]).unwrap_err().to_string().starts_with("prefill: 0: expected"));
    }
}
