//! Rules between fields, and the bucket lists.

use super::bucket::{Buckets, common_divisor};
use super::check::Check;
use super::choice::{Chunking, KvAdmission};
use super::fields::{FIELD, Partial, RawConfig};

/// The smallest default token bucket.
const FIRST_TOKEN_BUCKET: u32 = 128;

/// The chunk planner keeps a table over prompt lengths, in units of the buckets' common divisor.
const CHUNK_TABLE_MAX: u32 = 1 << 22;

/// Apply every rule. A rule is skipped if one of its fields has a fault of its own.
pub(super) fn apply(raw: &RawConfig, partial: &mut Partial, check: &mut Check) {
    step_holds_one_token_per_request(partial, check);
    partial.num_batched_tokens_buckets = token_buckets(raw, partial, check);
    partial.num_seqs_buckets = seqs_buckets(raw, partial, check);
    partial.decode_context_length_buckets = context_buckets(raw, partial, check);
    longest_sequence_fits(partial, check);
    chunk_table_fits(partial, check);
    every_bucket_has_a_cost(partial, check);
}

fn step_holds_one_token_per_request(partial: &Partial, check: &mut Check) {
    if let (Some(tokens), Some(seqs)) = (partial.max_num_batched_tokens, partial.max_num_seqs)
        && tokens < seqs
    {
        check.fault(&FIELD.max_num_batched_tokens, tokens, format!("at least max_num_seqs = {seqs}"));
    }
}

/// The token buckets: as given, else the segment sizes, else doubling. Under decode context parallelism, only the
/// buckets that all ranks can share evenly.
fn token_buckets(raw: &RawConfig, partial: &Partial, check: &mut Check) -> Option<Buckets> {
    let budget = partial.max_num_batched_tokens?.min(partial.max_model_len?);
    check.expect_last(&FIELD.num_batched_tokens_buckets, budget);
    let given = match (&raw.num_batched_tokens_buckets, &raw.kv_segment_size_buckets) {
        (Some(sizes), _) => Some((&FIELD.num_batched_tokens_buckets, sizes)),
        (None, Some(sizes)) => Some((&FIELD.kv_segment_size_buckets, sizes)),
        (None, None) => None,
    };
    let (field, buckets) = match given {
        Some((field, _)) if check.has_fault(field) => return None,
        Some((field, sizes)) => (field, check.buckets(field, sizes, Some(budget))?),
        None => (&FIELD.num_batched_tokens_buckets, Buckets::doubling(FIRST_TOKEN_BUCKET, budget)),
    };
    let (dcp, block_size) = (partial.dcp?, partial.block_size?);
    if dcp == 1 {
        return Some(buckets);
    }
    let unit = u64::from(dcp) * u64::from(block_size);
    let even: Vec<i64> =
        buckets.sizes().iter().filter(|&&size| u64::from(size) % unit == 0).map(|&size| i64::from(size)).collect();
    if even.last() != Some(&i64::from(budget)) {
        let expected = format!("{budget} to be a multiple of dcp * block_size = {unit}");
        check.fault(field, format!("{:?}", buckets.sizes()), expected);
        return None;
    }
    check.buckets(field, &even, Some(budget))
}

fn seqs_buckets(raw: &RawConfig, partial: &Partial, check: &mut Check) -> Option<Buckets> {
    let field = &FIELD.num_seqs_buckets;
    let last = partial.max_num_seqs;
    let buckets = match &raw.num_seqs_buckets {
        Some(sizes) => check.buckets(field, sizes, last),
        None => last.map(|last| Buckets::doubling(1, last)),
    };
    if let Some(last) = last {
        check.expect_last(field, last);
    }
    buckets
}

fn context_buckets(raw: &RawConfig, partial: &Partial, check: &mut Check) -> Option<Buckets> {
    let field = &FIELD.decode_context_length_buckets;
    let last = partial.max_model_len?;
    let Some(sizes) = &raw.decode_context_length_buckets else {
        return check.buckets(field, &[i64::from(last)], None);
    };
    let buckets = check.buckets(field, sizes, None)?;
    if buckets.last() > last {
        check.fault(field, format!("{sizes:?}"), format!("sizes of at most max_model_len = {last}"));
        return None;
    }
    let mut completed = sizes.clone();
    if buckets.last() < last {
        completed.push(i64::from(last));
    }
    check.buckets(field, &completed, None)
}

/// With `kv_admission` `"max_model_len"`, the cache must hold one sequence of that length. Under decode context
/// parallelism a block holds more tokens than `block_size`, and the engine checks instead.
fn longest_sequence_fits(partial: &Partial, check: &mut Check) {
    if let (Some(KvAdmission::MaxModelLen), Some(len), Some(size), Some(blocks), Some(1)) =
        (partial.kv_admission, partial.max_model_len, partial.block_size, partial.num_blocks, partial.dcp)
        && len.div_ceil(size) > blocks
    {
        let usable = u64::from(size) * u64::from(blocks);
        let expected = format!("at most the {usable} usable KV tokens, with kv_admission 'max_model_len'");
        check.fault(&FIELD.max_model_len, len, expected);
    }
}

fn chunk_table_fits(partial: &Partial, check: &mut Check) {
    if let (Some(Chunking::Bucket), Some(buckets), Some(len)) =
        (partial.chunking, &partial.num_batched_tokens_buckets, partial.max_model_len)
    {
        let unit = common_divisor(buckets);
        if len.div_ceil(unit) > CHUNK_TABLE_MAX {
            let most = u64::from(CHUNK_TABLE_MAX) * u64::from(unit);
            let expected = format!("max_model_len of at most {most} with token buckets of common divisor {unit}");
            check.fault(&FIELD.chunking, "bucket", expected);
        }
    }
}

fn every_bucket_has_a_cost(partial: &Partial, check: &mut Check) {
    let (Some(Some(costs)), Some(buckets)) = (&partial.prefill_cost, &partial.num_batched_tokens_buckets) else {
        return;
    };
    let costed: Vec<u32> = costs.iter().map(|&(size, _)| size).collect();
    let missing: Vec<u32> =
        buckets.sizes().iter().copied().filter(|size| costed.binary_search(size).is_err()).collect();
    if !missing.is_empty() {
        let expected = format!("a cost for every token bucket; none for {missing:?}");
        check.fault(&FIELD.prefill_cost, format!("{costed:?}"), expected);
    }
}
