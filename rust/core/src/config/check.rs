//! Checking one field against its own declaration.

use super::bucket::Buckets;
use super::choice::{Choice, Chunking, KvAdmission};
use super::field::{Field, FieldDefault, FieldKind};
use super::value::Value;
use crate::error::{Error, Fault};
use crate::queue::Policy;
use crate::request::TOKENS_MAX;

/// The faults found so far.
pub(super) struct Check {
    faults: Vec<Fault>,
}

impl Check {
    pub(super) fn new(faults: Vec<Fault>) -> Self {
        Self { faults }
    }

    pub(super) fn fault(&mut self, field: &Field, value: impl std::fmt::Display, expected: impl Into<String>) {
        self.faults.push(Fault::new(field.name, value, expected));
    }

    pub(super) fn has_fault(&self, field: &Field) -> bool {
        self.faults.iter().any(|fault| fault.field == field.name)
    }

    /// Check a list of compiled sizes. The last size must be `last`, if that is known.
    pub(super) fn buckets(&mut self, field: &Field, sizes: &[i64], last: Option<u32>) -> Option<Buckets> {
        Buckets::new(field.name, sizes, last).map_err(|fault| self.faults.push(fault)).ok()
    }

    /// Add the required last size to a fault that says that `field` is not a list.
    pub(super) fn expect_last(&mut self, field: &Field, last: u32) {
        for fault in self.faults.iter_mut().filter(|fault| fault.field == field.name) {
            if !fault.expected.contains("end in") {
                fault.expected = format!("{}, ascending, that end in {last}", fault.expected);
            }
        }
    }

    /// Return all faults as one error, ordered by `position`.
    pub(super) fn finish(mut self, position: impl Fn(&Fault) -> Option<usize>) -> Result<(), Error> {
        self.faults.sort_by_key(position);
        if self.faults.is_empty() { Ok(()) } else { Err(Error::Invalid(self.faults)) }
    }

    fn required(&mut self, field: &Field, expected: String) {
        // A field of a wrong type was reported when it was read.
        if !self.has_fault(field) {
            self.fault(field, "missing", expected);
        }
    }

    fn count(&mut self, field: &Field, given: Option<i64>) -> Option<u32> {
        let FieldKind::Count(least) = field.kind else { unreachable!("{}: declared as a count", field.name) };
        let expected = || format!("a whole number from {least} to {TOKENS_MAX}");
        match (given, field.default) {
            (Some(value), _) => {
                let count = u32::try_from(value).ok().filter(|count| (least..=TOKENS_MAX).contains(count));
                if count.is_none() {
                    self.fault(field, value, expected());
                }
                count
            }
            (None, FieldDefault::Number(default)) => Some(default),
            (None, _) => {
                self.required(field, expected());
                None
            }
        }
    }
}

/// A type of field values that can be checked.
pub(super) trait Checked: Value {
    /// Check what was given for `field`, or fill in its default. `None` if a fault was added, or if a rule decides.
    fn check(check: &mut Check, field: &Field, given: Option<&Self::Given>) -> Option<Self>;
}

impl Checked for u32 {
    fn check(check: &mut Check, field: &Field, given: Option<&i64>) -> Option<Self> {
        check.count(field, given.copied())
    }
}

impl Checked for Option<u32> {
    fn check(check: &mut Check, field: &Field, given: Option<&i64>) -> Option<Self> {
        given.map_or(Some(None), |&given| check.count(field, Some(given)).map(Some))
    }
}

impl Checked for bool {
    fn check(_: &mut Check, _: &Field, given: Option<&Self>) -> Option<Self> {
        Some(given.copied().unwrap_or(false))
    }
}

/// The rule of the field decides: the last size depends on other fields.
impl Checked for Buckets {
    fn check(_: &mut Check, _: &Field, _: Option<&Vec<i64>>) -> Option<Self> {
        None
    }
}

impl Checked for Option<Buckets> {
    fn check(check: &mut Check, field: &Field, given: Option<&Vec<i64>>) -> Option<Self> {
        given.map_or(Some(None), |sizes| check.buckets(field, sizes, None).map(Some))
    }
}

impl Checked for Option<Vec<(u32, f64)>> {
    fn check(check: &mut Check, field: &Field, given: Option<&Vec<(i64, f64)>>) -> Option<Self> {
        let Some(given) = given else { return Some(None) };
        let mut costs = Vec::with_capacity(given.len());
        for &(size, cost) in given {
            match u32::try_from(size) {
                Ok(size @ 1..=TOKENS_MAX) if (0.0..=1e9).contains(&cost) => costs.push((size, cost)),
                _ => {
                    let expected = "padded tokens from 1, each with a cost from 0 to 1e9";
                    check.fault(field, format!("{size}: {cost}"), expected);
                }
            }
        }
        costs.sort_unstable_by_key(|&(size, _)| size);
        (costs.len() == given.len()).then_some(Some(costs))
    }
}

macro_rules! checked_choice {
    ($($choice:ty),+) => {$(
        impl Checked for $choice {
                    fn check(check: &mut Check, field: &Field, given: Option<&String>) -> Option<Self> {
                choice(check, field, given)
            }
        }
    )+};
}

checked_choice!(KvAdmission, Chunking, Policy);

fn choice<T: Choice>(check: &mut Check, field: &Field, given: Option<&String>) -> Option<T> {
    let Some(name) = given else { return Some(T::default()) };
    let found = T::from_name(name);
    if found.is_none() {
        let names: Vec<String> = T::ALL.iter().map(|choice| format!("'{}'", choice.name())).collect();
        check.fault(field, format!("'{name}'"), names.join(" or "));
    }
    found
}
