//! Conversion of Python values to numbers, ids and text. The exception for a bad value names field, value and
//! expectation.

mod count;
mod field;
mod instance;
mod tokens;
mod value;

pub(crate) use count::count;
pub(crate) use field::{FieldReader, sampling};
pub(crate) use instance::instance;
pub(crate) use tokens::read_tokens;
pub(crate) use value::{as_int, as_small_int, display, sequence_len};
