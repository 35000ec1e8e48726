//! Decision core of neuron-sched: which requests run in the next step, how many tokens each gets, and
//! what compiled shape the step is padded to.
//!
//! The rooms, from bottom to top; each module imports only from rooms before its own:
//!
//! * [`error`]: the mistakes a caller can make, and the violated invariants that are bugs of the core.
//! * [`request`]: handles of requests, the slab behind them, prompts and sampling options.
//! * [`queue`]: the waiting queue; the only place that decides order.
//! * [`config`]: every configuration field, its checks and its default; lists of compiled sizes.
//! * [`decide`]: admission, phase, chunks, the step and its check. No queue, no KV blocks.
//! * `kv`: the block pool, the prefix index, and the cache made of both.
//! * [`fill`]: the rows of a step as padded tensors of a compiled shape.
//! * [`exclusive`]: the scheduler whose steps are all prefill or all decode (`BucketScheduler`).
//! * [`mixed`]: the token-budget scheduler (`Scheduler`).
//! * [`worker`]: the state that a worker of another engine needs to fill tensors.
//! * [`sim`]: replay of a workload on a virtual clock, with a cost model of the device.
//!
//! The core reads no clock, no environment and no randomly seeded map: equal calls give equal answers.
//! "Does not fit now" is an answer ([`decide::Wait`]), a caller's mistake is an [`error::Error`], and a
//! panic is always a bug of the core.
#![forbid(unsafe_code)]

pub mod config;
pub mod decide;
pub mod error;
pub mod exclusive;
pub mod fill;
mod fixed_map;
mod kv;
pub mod mixed;
pub mod queue;
pub mod request;
pub mod sim;
pub mod worker;
