//! Tensors of compiled shapes: which shape the rows of a step get, and what every element of it is.
//!
//! A graph runs one shape, so a step is padded to it, and padding must neither reach the KV cache nor change a
//! result. Whatever writes the data writes the padding too, in one pass over memory that is used again: nothing
//! of an earlier step survives, and nothing is allocated. Rows come from a scheduler that vouches for them, or
//! from a caller, and then they are checked first ([`Layout::check_prefill`], [`Layout::check_decode`]).

mod check;
mod layout;
mod row;
mod tensors;

pub use check::Seen;
pub use layout::{Layout, Shape};
pub use row::{DecodeRow, NO_BLOCK, NO_SLOT, PrefillRow};
pub use tensors::{DecodeTensors, PrefillTensors};
