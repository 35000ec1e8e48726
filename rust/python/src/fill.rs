//! `PaddedInputs` and `Batch`: the padded arrays of a step.

mod batch;
mod buffers;
mod inputs;
mod memory;
mod rows;
mod tokens;

pub(crate) use batch::Batch;
pub(crate) use inputs::{PaddedInputs, bucket, refuse_bucket};
pub(crate) use tokens::TokensArgument;
