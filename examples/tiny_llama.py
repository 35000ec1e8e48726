"""A Llama of two layers with a paged KV cache, in plain torch: an example of a model for `PaddedInputs`.

Every shape follows from the shapes of the inputs, and no branch depends on the values of a tensor, so tracing gives one
graph for each compiled shape. Three rules keep padding out of the results:

* A token with slot -1 is not written (`write`): as an index, -1 would be the last slot.
* A token attends to the keys of its own request up to its own position only (`visible` in `forward`).
* KV slots beyond the length of a request are never read (`read`): a weight of zero does not suffice, as 0 * NaN is NaN.

The weights are random with a fixed seed. The queries are scaled up, so that attention selects single positions instead
of averaging over all of them. Every token of a prompt then affects the output, and a wrong KV block changes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from neuron_sched import NeuronConfig

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function of queries `[tokens, heads, head_size]`, keys and values `[tokens, kv_heads, head_size]`.

Returns `[tokens, heads * head_size]`.
"""


class TinyLlama(nn.Module):
    """The model and its KV cache, with the KV blocks of `config`.

    `kv_cache` has shape `[layers, 2 (keys and values), slots, kv_heads, head_size]`, float32, with (num_blocks + 1) *
    block_size slots. The content of block 0 never changes.
    """

    kv_cache: Tensor

    def __init__(
        self,
        config: NeuronConfig,
        *,
        vocab_size: int = 256,
        width: int = 64,
        inner: int = 128,
        layers: int = 2,
        heads: int = 4,
        kv_heads: int = 2,
        seed: int = 1,
    ) -> None:
        super().__init__()
        self.block_size = config.block_size
        self.vocab_size = vocab_size
        generator = torch.Generator().manual_seed(seed)
        embeddings = random_weight(vocab_size, width, width**0.5, generator)
        self.embed_tokens = nn.Embedding(vocab_size, width, _weight=embeddings)
        self.layers = nn.ModuleList(Layer(width, inner, heads, kv_heads, generator) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.lm_head = linear(width, vocab_size, 3.0, generator)
        slots = (config.num_blocks + 1) * config.block_size
        # Not persistent: the KV cache does not belong in a state dict.
        cache = torch.zeros(layers, 2, slots, kv_heads, width // heads)
        self.register_buffer("kv_cache", cache, persistent=False)
        self.requires_grad_(False)

    def forward(
        self,
        *,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        logits_index: Tensor,
        sampling_params: Tensor,  # for models that sample on the device; here the caller samples
        cached_seq_len: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        context_lens: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of a prefill or, with `context_lens`, of a decode step; write keys and values to the cache.

        The tensors are those of `Batch`. The logits have shape `[len(logits_index), vocab_size]`.
        """
        key_positions = torch.arange(block_table.shape[1] * self.block_size)
        if context_lens is None:
            filled = key_positions < cached_seq_len + cu_seqlens.diff()[:, None]
            # One group: T tokens, and the concatenated contexts of all P requests. Padding belongs to no request.
            token = torch.arange(input_ids.shape[0])[:, None]
            own = (cu_seqlens[:-1] <= token) & (token < cu_seqlens[1:])
            causal = key_positions <= positions[:, None]
            visible = (own[:, :, None] & causal[:, None]).reshape(1, input_ids.shape[0], -1)
        else:
            filled = key_positions < context_lens[:, None]
            visible = filled[:, None]  # B groups: one token, which attends to its whole context
        step = PagedAttention(slot_mapping, block_table, filled, visible)
        attentions = [functools.partial(step, cache) for cache in self.kv_cache.unbind()]
        return self.lm_head(self.hidden(input_ids, positions, attentions)[logits_index])

    def hidden(self, input_ids: Tensor, positions: Tensor, attentions: Sequence[Attention]) -> Tensor:
        """Return the hidden states after the last layer, shape `[tokens, width]`."""
        x = self.embed_tokens(input_ids)
        for layer, attention in zip(self.layers, attentions, strict=True):
            x = layer(x, positions, attention)
        return self.norm(x)


class Layer(nn.Module):
    """Attention and a gated MLP, each with a norm before it and a residual connection."""

    def __init__(self, width: int, inner: int, heads: int, kv_heads: int, generator: torch.Generator) -> None:
        super().__init__()
        self.head_size = width // heads
        self.input_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.q_proj = linear(width, width, 3.0, generator)
        self.k_proj = linear(width, self.head_size * kv_heads, 1.0, generator)
        self.v_proj = linear(width, self.head_size * kv_heads, 2.0, generator)
        self.o_proj = linear(width, width, 2.0, generator)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.gate_proj = linear(width, inner, 1.0, generator)
        self.up_proj = linear(width, inner, 1.0, generator)
        self.down_proj = linear(inner, width, 1.0, generator)

    def forward(self, x: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        h = self.input_layernorm(x)
        q, k, v = (proj(h).unflatten(-1, (-1, self.head_size)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        x = x + self.o_proj(attention(apply_rotary(q, positions), apply_rotary(k, positions), v))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(h)) * self.up_proj(h))


def apply_rotary(x: Tensor, positions: Tensor) -> Tensor:
    """Apply the rotary embedding to `x`, shape `[tokens, heads, head_size]`."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10000.0 ** (-torch.arange(half) / half)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


@dataclass(frozen=True)
class PagedAttention:
    """Attention of the tokens of one step over the KV cache, in groups that do not attend to each other.

    `filled`, shape `[requests, keys]`, is true where a request has a key. `visible`, shape `[groups, queries, keys]`,
    is true where a query attends to a key.
    """

    slot_mapping: Tensor
    block_table: Tensor
    filled: Tensor
    visible: Tensor

    def __call__(self, cache: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        for slots, new in zip(cache.unbind(), (keys, values), strict=True):
            write(slots, self.slot_mapping, new)
        contexts = (read(slots, self.block_table, self.filled) for slots in cache.unbind())
        grouped = (x.reshape(self.visible.shape[0], -1, *x.shape[-2:]) for x in (queries, *contexts))
        return attend(*grouped, self.visible).flatten(0, 1)


def write(cache: Tensor, slot_mapping: Tensor, new: Tensor) -> None:
    """Write the row of each token in `new` to the KV slot of the token, in place; slot -1 writes nothing.

    A graph of fixed shape writes one row per token. A row with slot -1 therefore rewrites slot 0 with its present
    content. Slot 0 is in block 0, which no request owns, so no two rows write different values to one slot.
    """
    has_slot = (slot_mapping >= 0)[:, None, None]
    cache.index_copy_(0, slot_mapping.clamp(min=0), torch.where(has_slot, new, cache[:1]))


def read(cache: Tensor, block_table: Tensor, filled: Tensor) -> Tensor:
    """Return the context of each request in order of position, shape `[requests, keys, kv_heads, head_size]`.

    Elements that are not `filled` are 0, whatever the cache holds at block id -1 or in the unused part of a block.
    """
    blocks = cache.unflatten(0, (-1, filled.shape[1] // block_table.shape[1]))
    return blocks[block_table.clamp(min=0)].flatten(1, 2).masked_fill(~filled[:, :, None, None], 0.0)


def attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Return softmax attention within groups, shape `[groups, queries, heads * head_size]`.

    `queries` has shape `[groups, queries, heads, head_size]`. Masked scores are the lowest finite number and not minus
    infinity, so a query without any visible key gives a finite value instead of NaN.
    """
    queries = queries.unflatten(2, (keys.shape[2], -1)) / keys.shape[3] ** 0.5
    scores = torch.einsum("nqkgd,nlkd->nkgql", queries, keys)
    weights = scores.masked_fill(~visible[:, None, None], torch.finfo(scores.dtype).min).softmax(-1)
    return torch.einsum("nkgql,nlkd->nqkgd", weights, values).flatten(2)


def random_weight(rows: int, columns: int, gain: float, generator: torch.Generator) -> Tensor:
    """Return normally distributed weights, scaled so that a product has `gain` times the spread of its input."""
    return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)


def linear(columns: int, rows: int, gain: float, generator: torch.Generator) -> nn.Linear:
    """Return a linear layer without bias from `columns` inputs to `rows` outputs, with random weights."""
    layer = nn.Linear(columns, rows, bias=False)
    layer.weight = nn.Parameter(random_weight(rows, columns, gain, generator))
    return layer


@torch.no_grad()
def dense_logits(model: TinyLlama, tokens: Sequence[int]) -> Tensor:
    """Return the logits of a single sequence by dense causal attention, without KV cache, padding or batching.

    Shape `[tokens, vocab_size]`.
    """

    def dense(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (queries, keys, values))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    ids = torch.tensor(tokens)
    return model.lm_head(model.hidden(ids, torch.arange(len(tokens)), [dense] * len(model.layers)))


def generate_reference(
    model: TinyLlama, prompt: Sequence[int], n: int, stop_token_ids: Sequence[int] = ()
) -> list[int]:
    """Return up to `n` greedy tokens after `prompt`, up to and including the first stop token."""
    out: list[int] = []
    while len(out) < n and not (out and out[-1] in stop_token_ids):
        out.append(int(dense_logits(model, [*prompt, *out])[-1].argmax()))
    return out
