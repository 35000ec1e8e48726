//! Ascending lists of compiled sizes.

use crate::error::{Error, Fault};
use crate::request::TOKENS_MAX;

/// An ascending list of at least one compiled size.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Buckets {
    sizes: Box<[u32]>,
}

impl Buckets {
    /// Check the list of sizes given for `field`. The last size must be `last`, if that is known.
    pub fn new(field: &'static str, sizes: &[i64], last: Option<u32>) -> Result<Self, Fault> {
        let fault = |what: &str| {
            let end = last.map_or_else(String::new, |last| format!(" that end in {last}"));
            Fault::new(field, format!("{sizes:?}"), format!("strictly ascending positive sizes{end} ({what})"))
        };
        if sizes.is_empty() {
            return Err(fault("the list is empty"));
        }
        let mut checked: Vec<u32> = Vec::with_capacity(sizes.len());
        for &size in sizes {
            let Some(value) = u32::try_from(size).ok().filter(|&v| v > 0 && v <= TOKENS_MAX) else {
                return Err(fault(&format!("{size} is not between 1 and {TOKENS_MAX}")));
            };
            if let Some(&before) = checked.last()
                && before >= value
            {
                return Err(fault(&format!("{value} follows {before}")));
            }
            checked.push(value);
        }
        let end = checked[checked.len() - 1];
        if last.is_some_and(|last| last != end) {
            return Err(fault(&format!("the last one is {end}")));
        }
        Ok(Self { sizes: checked.into() })
    }

    /// Return sizes that double from `first` while they are below `last`, followed by `last`.
    pub fn doubling(first: u32, last: u32) -> Self {
        let below = std::iter::successors(Some(first), |size| size.checked_mul(2)).take_while(|&size| size < last);
        Self { sizes: below.chain([last]).collect() }
    }

    /// Return the smallest size of at least `count`, or 0 for 0. An error if `count` exceeds the last size.
    pub fn fit(&self, count: u32) -> Result<u32, Error> {
        if count == 0 {
            return Ok(0);
        }
        let at = self.sizes.partition_point(|&size| size < count);
        self.sizes
            .get(at)
            .copied()
            .ok_or_else(|| Error::invalid("count", count, format!("at most the last bucket, {}", self.last())))
    }

    /// Return the largest size.
    pub fn last(&self) -> u32 {
        self.sizes[self.sizes.len() - 1]
    }

    /// Return all sizes, ascending.
    pub fn sizes(&self) -> &[u32] {
        &self.sizes
    }
}

/// Return the greatest common divisor of the sizes.
pub fn common_divisor(buckets: &Buckets) -> u32 {
    let gcd = |mut a: u32, mut b: u32| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    buckets.sizes().iter().copied().fold(0, gcd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b02_doubling_keeps_the_maximum() {
        let cases: [(u32, &[u32]); 9] = [
            (1, &[1]),
            (64, &[64]),
            (100, &[100]),
            (127, &[127]),
            (128, &[128]),
            (129, &[128, 129]),
            (1000, &[128, 256, 512, 1000]),
            (3000, &[128, 256, 512, 1024, 2048, 3000]),
            (8192, &[128, 256, 512, 1024, 2048, 4096, 8192]),
        ];
        for (last, sizes) in cases {
            assert_eq!(Buckets::doubling(128, last).sizes(), sizes, "{last}");
        }
        assert_eq!(Buckets::doubling(1, 48).sizes(), [1, 2, 4, 8, 16, 32, 48]);
        assert_eq!(Buckets::doubling(1, u32::MAX).sizes().len(), 33);
    }

    #[test]
    fn b04_lists_are_checked() {
        let check = |sizes: &[i64]| Buckets::new("num_batched_tokens_buckets", sizes, Some(1000));
        assert_eq!(check(&[256, 512, 1000]).unwrap().sizes(), [256, 512, 1000]);
        let bad: [&[i64]; 7] =
            [&[512, 256, 1000], &[256, 256, 1000], &[0, 1000], &[128, 512], &[128, 1000, 2000], &[-1, 1000], &[]];
        for sizes in bad {
            let fault = check(sizes).unwrap_err();
            assert_eq!((fault.field, fault.value), ("num_batched_tokens_buckets", format!("{sizes:?}")));
            assert!(fault.expected.contains("end in 1000"), "{}", fault.expected);
        }
    }

    #[test]
    fn b05_fit_at_and_beyond_the_edges() {
        let buckets = Buckets::new("buckets", &[128, 256, 512, 1000], None).unwrap();
        let fits: Vec<u32> = [0, 1, 128, 129, 1000].iter().map(|&n| buckets.fit(n).unwrap()).collect();
        assert_eq!(fits, [0, 128, 128, 256, 1000]);
        assert!(buckets.fit(1001).is_err());
    }
}
