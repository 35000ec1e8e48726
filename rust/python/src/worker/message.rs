//! A step as the engine's scheduler tells it: Python's containers, read into plain values.

use std::collections::HashMap;

use neuron_sched_core::request::{Row, Sampling};
use neuron_sched_core::worker::{Told, ToldRow, Who};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyList, PyString, PyTuple};

use crate::convert::{Read, sampling};

/// Counts, padded counts, padded rows, ended ids, new requests, known requests.
pub(crate) type StepArguments<'py> =
    (Bound<'py, PyDict>, Bound<'py, PyDict>, Bound<'py, PyAny>, Vec<String>, Vec<NewArguments<'py>>, Known<'py>);

/// Id, prompt and outputs, tokens of the prompt, blocks, computed tokens, sampling.
type NewArguments<'py> =
    (Bound<'py, PyString>, Bound<'py, PyAny>, usize, Bound<'py, PyAny>, Bound<'py, PyAny>, SamplingArguments<'py>);

/// `top_k`, `top_p`, `temperature`.
type SamplingArguments<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);

/// Of each known request its id, computed tokens, new blocks and number of outputs; and those that start over, with
/// their tokens.
type Known<'py> = (Bound<'py, PyList>, Bound<'py, PyList>, Bound<'py, PyList>, Bound<'py, PyList>, Bound<'py, PyDict>);

/// A step in plain values, but for its names.
pub(crate) struct ToldStep<'py> {
    /// Who runs, in batch order.
    pub(crate) names: Bound<'py, PyTuple>,
    /// Who ended.
    pub(crate) finished: Vec<String>,
    /// Who begins, by place.
    pub(crate) fresh: Vec<(usize, String)>,
    num_seqs_padded: i64,
    rows: Vec<ReadRow>,
}

/// A row whose request is not looked up yet.
struct ReadRow {
    of: Of,
    blocks: Vec<u32>,
    computed: i64,
    count: i64,
    padded: i64,
}

enum Of {
    New { tokens: Vec<u32>, prompt: usize, sampling: Sampling },
    Known { outputs: i64 },
    Resumed { outputs: i64, tokens: Vec<u32> },
}

/// Where a row is told.
#[derive(Clone, Copy)]
enum Place {
    New(usize),
    Known(usize),
}

impl<'py> ToldStep<'py> {
    pub(crate) fn read(step: StepArguments<'py>) -> PyResult<Self> {
        let (counts, padded, num_seqs_padded, finished, new, known) = step;
        let num_seqs_padded = number(Read::Argument, "num_seqs_padded", &num_seqs_padded)?;
        // Lists that nobody else has: a count may be anything, and run code that changes the dict.
        let (names, counts) = (counts.keys().to_tuple(), counts.values());
        let (padded_names, padded_counts) = (padded.keys(), padded.values());
        if padded_names.len() != names.len() {
            let (given, expected) = (padded_names.len(), format!("those of the {} scheduled requests", names.len()));
            return Err(Read::Argument.value_error(
                "num_scheduled_tokens_padded",
                &format!("{given} counts"),
                &expected,
            ));
        }
        let places = places(&names, &new, &known)?;
        let (mut rows, mut fresh) = (Vec::with_capacity(places.len()), Vec::new());
        for (at, (id, place)) in names.iter().zip(places).enumerate() {
            let name = id.cast::<PyString>()?.to_str()?;
            let read = Read::Request(name);
            let (of, blocks, computed) = match place {
                Place::New(at) => read_new(read, &new[at])?,
                Place::Known(at) => read_known(read, &id, &known, at)?,
            };
            if matches!(of, Of::New { .. }) {
                fresh.push((at, name.to_owned()));
            }
            let count = number(read, "num_scheduled_tokens", &counts.get_item(at)?)?;
            // The two dicts have the same order, but nothing else depends on it.
            let in_order = padded_names.get_item(at)?.is(&id).then(|| padded_counts.get_item(at));
            let padded = in_order.map_or_else(|| padded.get_item(&id), |padded| padded.map(Some))?;
            let padded = match padded {
                Some(padded) => number(read, "num_scheduled_tokens_padded", &padded)?,
                None => return Err(read.value_error("num_scheduled_tokens_padded", "none", "a count")),
            };
            rows.push(ReadRow { of, blocks, computed, count, padded });
        }
        if rows.iter().filter(|row| matches!(row.of, Of::Resumed { .. })).count() != known.4.len() {
            refuse_strangers(&known)?;
        }
        Ok(Self { names, finished, fresh, num_seqs_padded, rows })
    }

    /// The name of the row at `at`; runs no code of Python's.
    pub(crate) fn name(&self, at: usize) -> String {
        name_at(&self.names, at)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    pub(crate) fn is_decode(&self) -> bool {
        self.num_seqs_padded != 0
    }

    /// The step with its names looked up, which is done once and runs no code of Python's. An id that nobody knows is
    /// refused.
    pub(crate) fn resolve(&mut self, known: &HashMap<String, Row>) -> PyResult<Told> {
        let mut rows = Vec::with_capacity(self.rows.len());
        for (name, row) in self.names.iter_borrowed().zip(std::mem::take(&mut self.rows)) {
            let ReadRow { of, blocks, computed, count, padded } = row;
            let name = name.cast::<PyString>()?;
            let name = name.to_str()?;
            let row = known.get(name).copied();
            let known =
                || row.ok_or_else(|| Read::Request(name).value_error("num_scheduled_tokens", "unknown", UNKNOWN));
            let who = match of {
                Of::New { tokens, prompt, sampling } => Who::New { tokens, prompt, sampling, replaces: row },
                Of::Known { outputs } => Who::Known { row: known()?, outputs },
                Of::Resumed { outputs, tokens } => Who::Resumed { row: known()?, outputs, tokens },
            };
            rows.push(ToldRow { who, blocks, computed, count, padded });
        }
        let finished = self.finished.iter().filter_map(|name| known.get(name).copied()).collect();
        Ok(Told { finished, rows, num_seqs_padded: self.num_seqs_padded })
    }
}

pub(crate) fn name_at(names: &Bound<'_, PyTuple>, at: usize) -> String {
    let name = names.get_item(at).ok().and_then(|name| name.cast_into::<PyString>().ok());
    name.map_or(String::new(), |name| name.to_string_lossy().into_owned())
}

const UNKNOWN: &str = "a request that was told before, and not told to have ended";

/// Where each scheduled request is told, in batch order; each once, and nobody else.
fn places(names: &Bound<'_, PyTuple>, new: &[NewArguments<'_>], known: &Known<'_>) -> PyResult<Vec<Place>> {
    let (ids, computed, blocks, outputs, _) = known;
    let lengths = [ids.len(), computed.len(), blocks.len(), outputs.len()];
    if lengths.iter().any(|&len| len != ids.len()) {
        let text = format!("{lengths:?} ids, counts, blocks and outputs");
        return Err(Read::Argument.value_error("scheduled_cached_reqs", &text, "as many of each"));
    }
    let mut places = Vec::with_capacity(names.len());
    let mut others: Option<HashMap<String, Place>> = None;
    let mut next = 0;
    for id in names {
        // A decode step tells them in the order of its batch.
        if next < ids.len() && ids.get_item(next)?.eq(&id)? {
            places.push(Place::Known(next));
            next += 1;
            continue;
        }
        let others = match &mut others {
            Some(others) => others,
            none => none.insert(by_name(new, ids)?),
        };
        let name = id.cast::<PyString>()?.to_str()?;
        places.push(others.get(name).copied().ok_or_else(|| {
            let expected = "one of scheduled_new_reqs or scheduled_cached_reqs";
            Read::Request(name).value_error("num_scheduled_tokens", "told nowhere", expected)
        })?);
    }
    if places.len() != new.len() + ids.len() {
        for id in new.iter().map(|(id, ..)| id.clone().into_any()).chain(ids.iter()) {
            if !names.contains(&id)? {
                let read = Read::Request(id.cast::<PyString>()?.to_str()?);
                return Err(read.value_error("num_scheduled_tokens", "none", "a count of each request that is told"));
            }
        }
        by_name(new, ids)?;
    }
    Ok(places)
}

/// Only who goes on can start over.
fn refuse_strangers((ids, _, _, _, resumed): &Known<'_>) -> PyResult<()> {
    for id in resumed.keys() {
        if !ids.contains(&id)? {
            let read = Read::Request(id.cast::<PyString>()?.to_str()?);
            return Err(read.value_error("resumed_req_ids", "told nowhere", "one of scheduled_cached_reqs"));
        }
    }
    Ok(())
}

fn by_name(new: &[NewArguments<'_>], ids: &Bound<'_, PyList>) -> PyResult<HashMap<String, Place>> {
    let mut places = HashMap::new();
    let new = new.iter().enumerate().map(|(at, (id, ..))| (id.clone().into_any(), Place::New(at)));
    for (id, place) in new.chain(ids.iter().enumerate().map(|(at, id)| (id, Place::Known(at)))) {
        let name = id.cast::<PyString>()?.to_str()?;
        if places.insert(name.to_owned(), place).is_some() {
            let field = "scheduled_new_reqs, scheduled_cached_reqs";
            return Err(Read::Request(name).value_error(field, "told twice", "each request once"));
        }
    }
    Ok(places)
}

fn read_new(read: Read<'_>, new: &NewArguments<'_>) -> PyResult<(Of, Vec<u32>, i64)> {
    let (_, tokens, prompt, blocks, computed, wishes) = new;
    let (top_k, top_p, temperature) = wishes;
    let sampling = sampling(read.top_k(top_k)?, read.top_p(top_p)?, read.temperature(temperature)?);
    let tokens = read.ids("prompt_token_ids", tokens, "a sequence of token ids")?;
    let blocks = read_blocks(read, "block_ids", blocks)?;
    let computed = number(read, "num_computed_tokens", computed)?;
    Ok((Of::New { tokens, prompt: *prompt, sampling }, blocks, computed))
}

fn read_known(read: Read<'_>, id: &Bound<'_, PyAny>, known: &Known<'_>, at: usize) -> PyResult<(Of, Vec<u32>, i64)> {
    let (_, computed, blocks, outputs, resumed) = known;
    let blocks = blocks.get_item(at)?;
    let computed = number(read, "num_computed_tokens", &computed.get_item(at)?)?;
    let outputs = number(read, "num_output_tokens", &outputs.get_item(at)?)?;
    let started_over = if resumed.is_empty() { None } else { resumed.get_item(id)? };
    let Some(tokens) = started_over else {
        let blocks = if blocks.is_none() { Vec::new() } else { read_blocks(read, "new_block_ids", &blocks)? };
        return Ok((Of::Known { outputs }, blocks, computed));
    };
    let tokens = read.ids("all_token_ids", &tokens, "a sequence of token ids")?;
    Ok((Of::Resumed { outputs, tokens }, read_blocks(read, "new_block_ids", &blocks)?, computed))
}

/// The blocks of the only KV cache group there is.
fn read_blocks(read: Read<'_>, field: &str, groups: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let Ok(groups) = groups.cast::<PyTuple>() else {
        return Err(read.type_error(field, groups, "a tuple with one list of block ids"));
    };
    if groups.len() != 1 {
        let value = format!("those of {} KV cache groups", groups.len());
        return Err(read.value_error(field, &value, "one group, with full attention: no other is supported"));
    }
    read.ids(field, &groups.get_item(0)?, "a list of block ids")
}

/// A whole number, for the core to judge.
fn number(read: Read<'_>, field: &str, value: &Bound<'_, PyAny>) -> PyResult<i64> {
    if value.is_exact_instance_of::<PyInt>()
        && let Ok(number) = value.extract()
    {
        return Ok(number);
    }
    read.count(field, value, i64::MIN..=i64::MAX)
}
