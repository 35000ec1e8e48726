//! `PaddedInputs` and `Batch`: the tensors of a step, in memory that belongs to their shape.

mod batch;
mod buffers;
mod inputs;
mod memory;
mod rows;
mod tokens;

pub(crate) use batch::Batch;
pub(crate) use inputs::{PaddedInputs, bucket, refuse_bucket};
pub(crate) use tokens::Given;
