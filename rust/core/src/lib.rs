//! Decision core of neuron-sched: which requests run in the next step, how many tokens each request gets, and the
//! compiled shape that the step is padded to.
//!
//! The modules, from bottom to top; each imports only from those listed before it:
//!
//! * [`error`]: the errors that a caller can cause, and the violated invariants that are bugs in the core.
//! * [`request`]: request handles, the slab that they index, prompts and sampling options.
//! * [`queue`]: the waiting queue, the only place that decides the order of requests.
//! * [`config`]: every configuration field with its checks and its default; lists of compiled sizes.
//! * [`decide`]: admission, phase, chunks, the step and its check. It owns no queue and no KV blocks.
//! * `kv`: the block pool, the prefix index, and the KV cache that combines the two.
//! * [`fill`]: the rows of a step as padded tensors of a compiled shape.
//! * [`exclusive`]: the scheduler with steps that are all prefill or all decode (`BucketScheduler`).
//! * [`mixed`]: the token-budget scheduler (`Scheduler`).
//! * [`worker`]: the request state that a worker of another engine needs to fill tensors.
//! * [`sim`]: replay of a workload on a virtual clock, with a cost model of the device.
//!
//! The core reads no clock and no environment, and uses no randomly seeded map: equal calls give equal results. A
//! request that does not fit yet is an ordinary result ([`decide::Wait`]), a caller's mistake is an
//! [`error::Error`], and a panic is always a bug in the core.
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
