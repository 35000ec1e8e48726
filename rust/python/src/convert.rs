//! Python values as numbers, ids and texts; a wrong value is an exception that names field, value and expectation.

mod count;
mod field;
mod tokens;
mod value;

pub(crate) use count::count;
pub(crate) use field::{Read, sampling};
pub(crate) use tokens::read_tokens;
pub(crate) use value::{plain, sequence_len, shown, whole};
