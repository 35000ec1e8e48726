//! `NeuronConfig` and `Buckets`: Python values that the core checks.

use neuron_sched_core::bucket;
use neuron_sched_core::config::{Config, RawConfig};
use neuron_sched_core::error::{Error, Fault};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyList, PyString, PyTuple};

use crate::error::to_py;
use crate::value::{shown, whole};

/// A keyword argument; absent and `None` mean the default.
type Given<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// Numbers and lists as Python gives them; a wrong type becomes a fault, reported with all the others.
struct Reader {
    faults: Vec<Fault>,
}

impl Reader {
    fn fault<T>(&mut self, field: &'static str, value: &Bound<'_, PyAny>, expected: &str) -> Option<T> {
        self.faults.push(Fault::new(field, shown(value), expected));
        None
    }

    /// A whole number; one that 64 bits do not hold is as wrong as any other that is far too large.
    fn int(&mut self, field: &'static str, value: Given<'_, '_>) -> Option<i64> {
        let value = value.filter(|value| !value.is_none())?;
        int(value).or_else(|| self.fault(field, value, "a whole number"))
    }

    fn ints(&mut self, field: &'static str, value: Given<'_, '_>) -> Option<Vec<i64>> {
        let value = value.filter(|value| !value.is_none())?;
        let items = sequence(value).and_then(|items| items.iter().map(int).collect());
        items.or_else(|| self.fault(field, value, "a list of whole numbers"))
    }

    fn name(&mut self, field: &'static str, value: Given<'_, '_>) -> Option<String> {
        let value = value.filter(|value| !value.is_none())?;
        value.cast::<PyString>().map(ToString::to_string).ok().or_else(|| self.fault(field, value, "a string"))
    }

    fn flag(&mut self, field: &'static str, value: Given<'_, '_>) -> Option<bool> {
        let value = value.filter(|value| !value.is_none())?;
        value.cast::<PyBool>().map(PyBoolMethods::is_true).ok().or_else(|| self.fault(field, value, "True or False"))
    }

    fn costs(&mut self, field: &'static str, value: Given<'_, '_>) -> Option<Vec<(i64, f64)>> {
        let value = value.filter(|value| !value.is_none())?;
        let read = |dict: &Bound<'_, PyDict>| {
            dict.iter().map(|(size, cost)| Some((int(&size)?, number(&cost)?))).collect::<Option<Vec<_>>>()
        };
        let table = value.cast::<PyDict>().ok().and_then(read);
        table.or_else(|| self.fault(field, value, "a dict {padded tokens: cost}"))
    }
}

/// A whole number in 64 bits.
fn int(value: &Bound<'_, PyAny>) -> Option<i64> {
    whole(value)?.extract().ok()
}

fn number(value: &Bound<'_, PyAny>) -> Option<f64> {
    if value.is_instance_of::<PyFloat>() { value.extract().ok() } else { whole(value)?.extract().ok() }
}

/// The items of a list or a tuple.
fn sequence<'py>(value: &Bound<'py, PyAny>) -> Option<Vec<Bound<'py, PyAny>>> {
    if let Ok(list) = value.cast::<PyList>() {
        return Some(list.iter().collect());
    }
    value.cast::<PyTuple>().ok().map(|tuple| tuple.iter().collect())
}

/// An ascending list of compiled sizes, and the smallest one that holds a count.
#[pyclass(frozen, eq, hash, module = "neuron_sched")]
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Buckets {
    inner: bucket::Buckets,
}

#[pymethods]
impl Buckets {
    #[new]
    fn new(sizes: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut reader = Reader { faults: Vec::new() };
        let sizes = reader.ints("sizes", Some(sizes));
        let inner = match sizes {
            Some(sizes) => bucket::Buckets::new("sizes", &sizes, None),
            None => Err(reader.faults.pop().unwrap_or_else(|| Fault::new("sizes", "None", "a list of whole numbers"))),
        };
        inner.map(|inner| Self { inner }).map_err(|fault| to_py(&Error::Invalid(vec![fault])))
    }

    /// The smallest size that holds `count`; 0 for 0; `ValueError` when negative or above the last size.
    fn fit(&self, count: &Bound<'_, PyAny>) -> PyResult<u32> {
        let read = int(count).and_then(|count| u32::try_from(count).ok());
        let Some(count) = read else {
            let expected = format!("a whole number from 0 to the last bucket, {}", self.inner.last());
            return Err(to_py(&Error::invalid("count", count.repr()?, expected)));
        };
        self.inner.fit(count).map_err(|error| to_py(&error))
    }

    /// All sizes, ascending.
    #[getter]
    fn sizes(&self) -> Vec<u32> {
        self.inner.sizes().to_vec()
    }

    fn __len__(&self) -> usize {
        self.inner.sizes().len()
    }

    fn __repr__(&self) -> String {
        format!("Buckets({:?})", self.inner.sizes())
    }
}

/// Configuration of `BucketScheduler`: checked when made, every default filled in, immutable, hashable.
///
/// Required are `max_num_seqs`, `max_num_batched_tokens`, `max_model_len`, `block_size` and `num_blocks`. None
/// stands for the default. One `ValueError` lists all faults, a line each, with the field, its value and what is
/// expected.
#[pyclass(frozen, eq, module = "neuron_sched")]
#[derive(Clone, PartialEq)]
pub(crate) struct NeuronConfig {
    inner: Config,
}

impl NeuronConfig {
    /// The checked values.
    pub(crate) fn core(&self) -> &Config {
        &self.inner
    }
}

#[pymethods]
impl NeuronConfig {
    #[new]
    // Five fields are required. They are taken as if they were not, so that one that is missing is a fault among
    // the others.
    #[pyo3(
        signature = (*, max_num_seqs=None, max_num_batched_tokens=None, max_model_len=None, block_size=None, num_blocks=None, num_batched_tokens_buckets=None, num_seqs_buckets=None, decode_context_length_buckets=None, kv_segment_size_buckets=None, max_prefills_per_batch=None, kv_admission=None, max_consecutive_prefill_steps=None, min_decode_steps=None, chunking=None, prefill_cost=None, long_prefill_token_threshold=None, prefix_caching=None, policy=None, lookahead=None, dcp=None),
        text_signature = "(*, max_num_seqs, max_num_batched_tokens, max_model_len, block_size, num_blocks, \
            num_batched_tokens_buckets=None, num_seqs_buckets=None, decode_context_length_buckets=None, \
            kv_segment_size_buckets=None, max_prefills_per_batch=None, kv_admission=None, \
            max_consecutive_prefill_steps=None, min_decode_steps=None, chunking=None, prefill_cost=None, \
            long_prefill_token_threshold=None, prefix_caching=None, policy=None, lookahead=None, dcp=None)"
    )]
    #[allow(clippy::too_many_arguments, reason = "one argument a field, so that Python sees the signature")]
    fn new(
        max_num_seqs: Given<'_, '_>,
        max_num_batched_tokens: Given<'_, '_>,
        max_model_len: Given<'_, '_>,
        block_size: Given<'_, '_>,
        num_blocks: Given<'_, '_>,
        num_batched_tokens_buckets: Given<'_, '_>,
        num_seqs_buckets: Given<'_, '_>,
        decode_context_length_buckets: Given<'_, '_>,
        kv_segment_size_buckets: Given<'_, '_>,
        max_prefills_per_batch: Given<'_, '_>,
        kv_admission: Given<'_, '_>,
        max_consecutive_prefill_steps: Given<'_, '_>,
        min_decode_steps: Given<'_, '_>,
        chunking: Given<'_, '_>,
        prefill_cost: Given<'_, '_>,
        long_prefill_token_threshold: Given<'_, '_>,
        prefix_caching: Given<'_, '_>,
        policy: Given<'_, '_>,
        lookahead: Given<'_, '_>,
        dcp: Given<'_, '_>,
    ) -> PyResult<Self> {
        let mut read = Reader { faults: Vec::new() };
        let mut raw = RawConfig {
            max_num_seqs: read.int("max_num_seqs", max_num_seqs),
            max_num_batched_tokens: read.int("max_num_batched_tokens", max_num_batched_tokens),
            max_model_len: read.int("max_model_len", max_model_len),
            block_size: read.int("block_size", block_size),
            num_blocks: read.int("num_blocks", num_blocks),
            num_batched_tokens_buckets: read.ints("num_batched_tokens_buckets", num_batched_tokens_buckets),
            num_seqs_buckets: read.ints("num_seqs_buckets", num_seqs_buckets),
            decode_context_length_buckets: read.ints("decode_context_length_buckets", decode_context_length_buckets),
            kv_segment_size_buckets: read.ints("kv_segment_size_buckets", kv_segment_size_buckets),
            max_prefills_per_batch: read.int("max_prefills_per_batch", max_prefills_per_batch),
            kv_admission: read.name("kv_admission", kv_admission),
            max_consecutive_prefill_steps: read.int("max_consecutive_prefill_steps", max_consecutive_prefill_steps),
            min_decode_steps: read.int("min_decode_steps", min_decode_steps),
            chunking: read.name("chunking", chunking),
            prefill_cost: read.costs("prefill_cost", prefill_cost),
            long_prefill_token_threshold: read.int("long_prefill_token_threshold", long_prefill_token_threshold),
            prefix_caching: read.flag("prefix_caching", prefix_caching),
            policy: read.name("policy", policy),
            lookahead: read.int("lookahead", lookahead),
            dcp: read.int("dcp", dcp),
            faults: Vec::new(),
        };
        raw.faults = read.faults;
        Config::resolve(&raw).map(|inner| Self { inner }).map_err(|error| to_py(&error))
    }

    /// All fields by name, defaults filled in: `NeuronConfig(**config.as_dict()) == config`.
    fn as_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("max_num_seqs", self.max_num_seqs())?;
        dict.set_item("max_num_batched_tokens", self.max_num_batched_tokens())?;
        dict.set_item("max_model_len", self.max_model_len())?;
        dict.set_item("block_size", self.block_size())?;
        dict.set_item("num_blocks", self.num_blocks())?;
        dict.set_item("num_batched_tokens_buckets", self.num_batched_tokens_buckets())?;
        dict.set_item("num_seqs_buckets", self.num_seqs_buckets())?;
        dict.set_item("decode_context_length_buckets", self.decode_context_length_buckets())?;
        dict.set_item("kv_segment_size_buckets", self.kv_segment_size_buckets())?;
        dict.set_item("max_prefills_per_batch", self.max_prefills_per_batch())?;
        dict.set_item("kv_admission", self.kv_admission())?;
        dict.set_item("max_consecutive_prefill_steps", self.max_consecutive_prefill_steps())?;
        dict.set_item("min_decode_steps", self.min_decode_steps())?;
        dict.set_item("chunking", self.chunking())?;
        dict.set_item("prefill_cost", self.prefill_cost(py)?)?;
        dict.set_item("long_prefill_token_threshold", self.long_prefill_token_threshold())?;
        dict.set_item("prefix_caching", self.prefix_caching())?;
        dict.set_item("policy", self.policy())?;
        dict.set_item("lookahead", self.lookahead())?;
        dict.set_item("dcp", self.dcp())?;
        Ok(dict)
    }

    /// Most requests that hold a slot at once.
    #[getter]
    fn max_num_seqs(&self) -> u32 {
        self.inner.max_num_seqs
    }

    /// Most tokens of one step; at least `max_num_seqs`.
    #[getter]
    fn max_num_batched_tokens(&self) -> u32 {
        self.inner.max_num_batched_tokens
    }

    /// Longest sequence in tokens, prompt and outputs together.
    #[getter]
    fn max_model_len(&self) -> u32 {
        self.inner.max_model_len
    }

    /// Tokens of one KV block.
    #[getter]
    fn block_size(&self) -> u32 {
        self.inner.block_size
    }

    /// Usable KV blocks. Their ids are 1 to `num_blocks`; block 0 is never given out.
    #[getter]
    fn num_blocks(&self) -> u32 {
        self.inner.num_blocks
    }

    /// Compiled prefill sizes in tokens, ascending; the last is `min(max_num_batched_tokens, max_model_len)`.
    ///
    /// Default: doubling from 128 while below the last, then the last.
    #[getter]
    fn num_batched_tokens_buckets(&self) -> Vec<u32> {
        self.inner.num_batched_tokens_buckets.sizes().to_vec()
    }

    /// Compiled decode batch sizes, ascending, up to `max_num_seqs`. Default: doubling from 1.
    #[getter]
    fn num_seqs_buckets(&self) -> Vec<u32> {
        self.inner.num_seqs_buckets.sizes().to_vec()
    }

    /// Compiled decode context lengths in tokens, completed with `max_model_len`. Default: that alone.
    #[getter]
    fn decode_context_length_buckets(&self) -> Vec<u32> {
        self.inner.decode_context_length_buckets.sizes().to_vec()
    }

    /// Segment sizes of segmented prefill; where given alone, the token buckets are this list.
    #[getter]
    fn kv_segment_size_buckets(&self) -> Option<Vec<u32>> {
        self.inner.kv_segment_size_buckets.as_ref().map(|buckets| buckets.sizes().to_vec())
    }

    /// Most prompts that start in one step. Default: 1.
    #[getter]
    fn max_prefills_per_batch(&self) -> u32 {
        self.inner.max_prefills_per_batch
    }

    /// How the KV cache is promised, so that nobody is ever evicted.
    ///
    /// `"reserve"` (default): each request reserves its own worst case; `"max_model_len"`: each counts as a
    /// sequence of the longest length.
    #[getter]
    fn kv_admission(&self) -> &'static str {
        self.inner.kv_admission.name()
    }

    /// Most prefill steps in a row while a decode is ready. Default None: prefill first, without bound.
    #[getter]
    fn max_consecutive_prefill_steps(&self) -> Option<u32> {
        self.inner.max_consecutive_prefill_steps
    }

    /// Decode steps owed once `max_consecutive_prefill_steps` is hit. Default: 1.
    #[getter]
    fn min_decode_steps(&self) -> u32 {
        self.inner.min_decode_steps
    }

    /// How a long prompt is cut.
    ///
    /// `"fixed"` (default): as much as a step takes; `"bucket"`: where ending on a bucket edge is cheaper.
    #[getter]
    fn chunking(&self) -> &'static str {
        self.inner.chunking.name()
    }

    /// For chunking `"bucket"`: cost of a prefill of each padded size, any unit. Default: the size + 256.
    #[getter]
    fn prefill_cost<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(costs) = &self.inner.prefill_cost else { return Ok(None) };
        let dict = PyDict::new(py);
        for (size, cost) in costs {
            dict.set_item(size, cost)?;
        }
        Ok(Some(dict))
    }

    /// Most prompt tokens of a step while other requests are there; 0 (default) is off.
    #[getter]
    fn long_prefill_token_threshold(&self) -> u32 {
        self.inner.long_prefill_token_threshold
    }

    /// Whether full KV blocks are shared by content. Default: False.
    #[getter]
    fn prefix_caching(&self) -> bool {
        self.inner.prefix_caching
    }

    /// Order of the queue: first come first served (default), or the lower priority number first.
    #[getter]
    fn policy(&self) -> &'static str {
        self.inner.policy.name()
    }

    /// Tokens beyond the next one for which KV slots are kept (speculative decoding). Default: 0.
    #[getter]
    fn lookahead(&self) -> u32 {
        self.inner.lookahead
    }

    /// Decode context parallel size; above 1, only token buckets divisible by `dcp * block_size` stay. Default: 1.
    #[getter]
    fn dcp(&self) -> u32 {
        self.inner.dcp
    }

    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyDict>)> {
        Ok((PyTuple::empty(py), self.as_dict(py)?))
    }

    fn __hash__(&self, py: Python<'_>) -> PyResult<isize> {
        PyString::new(py, &self.__repr__(py)?).hash()
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let fields: Vec<String> = self
            .as_dict(py)?
            .iter()
            .map(|(name, value)| Ok(format!("{name}={}", value.repr()?)))
            .collect::<PyResult<_>>()?;
        Ok(format!("NeuronConfig({})", fields.join(", ")))
    }
}
