//! Padded tensors: the compiled shape of a step, and the value of every element.
//!
//! A graph runs one shape, so a step is padded to it. Padding must neither reach the KV cache nor change a result.
//! One pass writes data and padding into reused memory: no element of an earlier step survives, and nothing is
//! allocated. The rows of a scheduler's step are valid by construction; the rows of any other caller are checked first
//! ([`Layout::check_prefill`], [`Layout::check_decode`]).

mod check;
mod layout;
mod row;
mod tensors;

pub use check::Seen;
pub use layout::{Layout, Shape};
pub use row::{DecodeRow, NO_BLOCK, NO_SLOT, PrefillRow};
pub use tensors::{DecodeTensors, PrefillTensors};
