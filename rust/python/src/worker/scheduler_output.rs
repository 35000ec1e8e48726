//! `SchedulerOutput`: a step from vLLM's scheduler, converted from Python containers to plain values.

use std::collections::HashMap;

use neuron_sched_core::request::{Row, Sampling};
use neuron_sched_core::worker::{RequestUpdate, ScheduledRow, ScheduledStep};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyList, PyString, PyTuple};

use crate::convert::{FieldReader, sampling};

/// Token counts, padded token counts, padded number of rows, ids of finished requests, new requests, known requests.
pub(crate) type StepArguments<'py> =
    (Bound<'py, PyDict>, Bound<'py, PyDict>, Bound<'py, PyAny>, Vec<String>, Vec<NewArguments<'py>>, Known<'py>);

/// Id, prompt tokens followed by output tokens, number of prompt tokens, blocks, computed tokens, sampling parameters.
type NewArguments<'py> =
    (Bound<'py, PyString>, Bound<'py, PyAny>, usize, Bound<'py, PyAny>, Bound<'py, PyAny>, SamplingArguments<'py>);

/// `top_k`, `top_p`, `temperature`.
type SamplingArguments<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>, Bound<'py, PyAny>);

/// Ids, computed tokens, new blocks and numbers of outputs of the known requests, one item per request; then the tokens
/// of the resumed ones by id.
type Known<'py> = (Bound<'py, PyList>, Bound<'py, PyList>, Bound<'py, PyList>, Bound<'py, PyList>, Bound<'py, PyDict>);

/// The values of a step, with request ids instead of row handles.
pub(crate) struct SchedulerOutput<'py> {
    /// Ids of the scheduled requests, in batch order.
    pub(crate) ids: Bound<'py, PyTuple>,
    /// Ids of the finished requests.
    pub(crate) finished: Vec<String>,
    /// New requests: position in the batch, and id.
    pub(crate) new: Vec<(usize, String)>,
    num_seqs_padded: i64,
    rows: Vec<RowValues>,
}

/// The values of a row; its request is not looked up yet.
struct RowValues {
    update: UpdateValues,
    blocks: Vec<u32>,
    computed: i64,
    count: i64,
    padded: i64,
}

/// A [`RequestUpdate`] without row handles.
enum UpdateValues {
    New { tokens: Vec<u32>, prompt: usize, sampling: Sampling },
    Known { outputs: i64 },
    Resumed { outputs: i64, tokens: Vec<u32> },
}

/// The entry of a scheduled request: an index into the new or into the known requests.
#[derive(Clone, Copy)]
enum Entry {
    New(usize),
    Known(usize),
}

impl<'py> SchedulerOutput<'py> {
    /// Convert the arguments of `Worker.fill`.
    pub(crate) fn read(step: StepArguments<'py>) -> PyResult<Self> {
        let (counts, padded, num_seqs_padded, finished, new, known) = step;
        let num_seqs_padded = number(FieldReader::Argument, "num_seqs_padded", &num_seqs_padded)?;
        // Private copies: converting a count may run Python code that changes the dicts.
        let (ids, counts) = (counts.keys().to_tuple(), counts.values());
        let (padded_ids, padded_counts) = (padded.keys(), padded.values());
        if padded_ids.len() != ids.len() {
            let (value, expected) = (padded_ids.len(), format!("those of the {} scheduled requests", ids.len()));
            return Err(FieldReader::Argument.value_error(
                "num_scheduled_tokens_padded",
                &format!("{value} counts"),
                &expected,
            ));
        }
        let entries = entries(&ids, &new, &known)?;
        let (mut rows, mut new_ids) = (Vec::with_capacity(entries.len()), Vec::new());
        for (at, (id, entry)) in ids.iter().zip(entries).enumerate() {
            let text = id.cast::<PyString>()?.to_str()?;
            let reader = FieldReader::Request(text);
            let (update, blocks, computed) = match entry {
                Entry::New(at) => read_new(reader, &new[at])?,
                Entry::Known(at) => read_known(reader, &id, &known, at)?,
            };
            if matches!(update, UpdateValues::New { .. }) {
                new_ids.push((at, text.to_owned()));
            }
            let count = number(reader, "num_scheduled_tokens", &counts.get_item(at)?)?;
            // Both dicts usually have the same order, which saves the look-up.
            let in_order = padded_ids.get_item(at)?.is(&id).then(|| padded_counts.get_item(at));
            let padded = in_order.map_or_else(|| padded.get_item(&id), |padded| padded.map(Some))?;
            let padded = match padded {
                Some(padded) => number(reader, "num_scheduled_tokens_padded", &padded)?,
                None => return Err(reader.value_error("num_scheduled_tokens_padded", "none", "a count")),
            };
            rows.push(RowValues { update, blocks, computed, count, padded });
        }
        if rows.iter().filter(|row| matches!(row.update, UpdateValues::Resumed { .. })).count() != known.4.len() {
            check_resumed(&known)?;
        }
        Ok(Self { ids, finished, new: new_ids, num_seqs_padded, rows })
    }

    /// Return the id of the row at position `at`, without running Python code.
    pub(crate) fn id(&self, at: usize) -> String {
        id_at(&self.ids, at)
    }

    /// Return whether no request is scheduled.
    pub(crate) fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Return whether this is a decode step.
    pub(crate) fn is_decode(&self) -> bool {
        self.num_seqs_padded != 0
    }

    /// Move the rows into a step with the handles of `known` requests, without running Python code. An error for an
    /// unknown id. Called once.
    pub(crate) fn resolve(&mut self, known: &HashMap<String, Row>) -> PyResult<ScheduledStep> {
        let mut rows = Vec::with_capacity(self.rows.len());
        for (id, row) in self.ids.iter_borrowed().zip(std::mem::take(&mut self.rows)) {
            let RowValues { update, blocks, computed, count, padded } = row;
            let id = id.cast::<PyString>()?;
            let id = id.to_str()?;
            let row = known.get(id).copied();
            let known =
                || row.ok_or_else(|| FieldReader::Request(id).value_error("num_scheduled_tokens", "unknown", KNOWN));
            let update = match update {
                UpdateValues::New { tokens, prompt, sampling } => {
                    RequestUpdate::New { tokens, prompt, sampling, replaces: row }
                }
                UpdateValues::Known { outputs } => RequestUpdate::Known { row: known()?, outputs },
                UpdateValues::Resumed { outputs, tokens } => RequestUpdate::Resumed { row: known()?, outputs, tokens },
            };
            rows.push(ScheduledRow { update, blocks, computed, count, padded });
        }
        let finished = self.finished.iter().filter_map(|id| known.get(id).copied()).collect();
        Ok(ScheduledStep { finished, rows, num_seqs_padded: self.num_seqs_padded })
    }
}

/// Return the id at position `at`, for messages.
pub(crate) fn id_at(ids: &Bound<'_, PyTuple>, at: usize) -> String {
    let id = ids.get_item(at).ok().and_then(|id| id.cast_into::<PyString>().ok());
    id.map_or(String::new(), |id| id.to_string_lossy().into_owned())
}

const KNOWN: &str = "a request of an earlier step that has not finished";

/// Return the entry of each scheduled request, in batch order. An error for a request without an entry or with two, and
/// for an entry without a scheduled request.
fn entries(ids: &Bound<'_, PyTuple>, new: &[NewArguments<'_>], known: &Known<'_>) -> PyResult<Vec<Entry>> {
    let (known_ids, computed, blocks, outputs, _) = known;
    let lengths = [known_ids.len(), computed.len(), blocks.len(), outputs.len()];
    if lengths.iter().any(|&len| len != known_ids.len()) {
        let text = format!("{lengths:?} ids, counts, blocks and outputs");
        return Err(FieldReader::Argument.value_error("scheduled_cached_reqs", &text, "lists of equal length"));
    }
    let mut entries = Vec::with_capacity(ids.len());
    let mut by_id: Option<HashMap<String, Entry>> = None;
    let mut next = 0;
    for id in ids {
        // The known requests of a decode step are in batch order, which saves the look-up.
        if next < known_ids.len() && known_ids.get_item(next)?.eq(&id)? {
            entries.push(Entry::Known(next));
            next += 1;
            continue;
        }
        let by_id = match &mut by_id {
            Some(by_id) => by_id,
            none => none.insert(entries_by_id(new, known_ids)?),
        };
        let id = id.cast::<PyString>()?.to_str()?;
        entries.push(by_id.get(id).copied().ok_or_else(|| {
            let expected = "an entry in scheduled_new_reqs or scheduled_cached_reqs";
            FieldReader::Request(id).value_error("num_scheduled_tokens", "no entry", expected)
        })?);
    }
    if entries.len() != new.len() + known_ids.len() {
        for id in new.iter().map(|(id, ..)| id.clone().into_any()).chain(known_ids.iter()) {
            if !ids.contains(&id)? {
                let reader = FieldReader::Request(id.cast::<PyString>()?.to_str()?);
                let expected = "a count for each entry of scheduled_new_reqs and scheduled_cached_reqs";
                return Err(reader.value_error("num_scheduled_tokens", "none", expected));
            }
        }
        entries_by_id(new, known_ids)?;
    }
    Ok(entries)
}

/// Check that every resumed request is a known request.
fn check_resumed((ids, _, _, _, resumed): &Known<'_>) -> PyResult<()> {
    for id in resumed.keys() {
        if !ids.contains(&id)? {
            let reader = FieldReader::Request(id.cast::<PyString>()?.to_str()?);
            return Err(reader.value_error("resumed_req_ids", "no entry", "an entry in scheduled_cached_reqs"));
        }
    }
    Ok(())
}

fn entries_by_id(new: &[NewArguments<'_>], known_ids: &Bound<'_, PyList>) -> PyResult<HashMap<String, Entry>> {
    let mut entries = HashMap::new();
    let new = new.iter().enumerate().map(|(at, (id, ..))| (id.clone().into_any(), Entry::New(at)));
    for (id, entry) in new.chain(known_ids.iter().enumerate().map(|(at, id)| (id, Entry::Known(at)))) {
        let id = id.cast::<PyString>()?.to_str()?;
        if entries.insert(id.to_owned(), entry).is_some() {
            let field = "scheduled_new_reqs, scheduled_cached_reqs";
            return Err(FieldReader::Request(id).value_error(field, "two entries", "one entry per request"));
        }
    }
    Ok(entries)
}

fn read_new(reader: FieldReader<'_>, new: &NewArguments<'_>) -> PyResult<(UpdateValues, Vec<u32>, i64)> {
    let (_, tokens, prompt, blocks, computed, (top_k, top_p, temperature)) = new;
    let sampling = sampling(reader.top_k(top_k)?, reader.top_p(top_p)?, reader.temperature(temperature)?);
    let tokens = reader.ids("prompt_token_ids", tokens, "a sequence of token ids")?;
    let blocks = read_blocks(reader, "block_ids", blocks)?;
    let computed = number(reader, "num_computed_tokens", computed)?;
    Ok((UpdateValues::New { tokens, prompt: *prompt, sampling }, blocks, computed))
}

fn read_known(
    reader: FieldReader<'_>,
    id: &Bound<'_, PyAny>,
    known: &Known<'_>,
    at: usize,
) -> PyResult<(UpdateValues, Vec<u32>, i64)> {
    let (_, computed, blocks, outputs, resumed) = known;
    let blocks = blocks.get_item(at)?;
    let computed = number(reader, "num_computed_tokens", &computed.get_item(at)?)?;
    let outputs = number(reader, "num_output_tokens", &outputs.get_item(at)?)?;
    let tokens = if resumed.is_empty() { None } else { resumed.get_item(id)? };
    let Some(tokens) = tokens else {
        let blocks = if blocks.is_none() { Vec::new() } else { read_blocks(reader, "new_block_ids", &blocks)? };
        return Ok((UpdateValues::Known { outputs }, blocks, computed));
    };
    let tokens = reader.ids("all_token_ids", &tokens, "a sequence of token ids")?;
    Ok((UpdateValues::Resumed { outputs, tokens }, read_blocks(reader, "new_block_ids", &blocks)?, computed))
}

/// Read the block ids of the only KV cache group. An error for more than one group.
fn read_blocks(reader: FieldReader<'_>, field: &str, groups: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let Ok(groups) = groups.cast::<PyTuple>() else {
        return Err(reader.type_error(field, groups, "a tuple with one list of block ids"));
    };
    if groups.len() != 1 {
        let value = format!("block ids of {} KV cache groups", groups.len());
        return Err(reader.value_error(field, &value, "one KV cache group, with full attention"));
    }
    reader.ids(field, &groups.get_item(0)?, "a list of block ids")
}

/// Read a whole number. The core checks the range.
fn number(reader: FieldReader<'_>, field: &str, value: &Bound<'_, PyAny>) -> PyResult<i64> {
    if value.is_exact_instance_of::<PyInt>()
        && let Ok(number) = value.extract()
    {
        return Ok(number);
    }
    reader.count(field, value, i64::MIN..=i64::MAX)
}
