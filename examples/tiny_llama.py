"""A Llama of two layers with a paged KV cache: what a model must do to run on `PaddedInputs`, in plain torch.

Every shape follows from the shapes of the inputs and no branch looks into a tensor, so tracing it gives one graph for
each compiled shape. Three rules keep padding out of the results:

* What has slot -1 is not written (`write`): -1 as an index would be the last slot.
* A token sees the keys of its own request up to its own position, and nothing else (`visible` in `forward`).
* What lies beyond a request's length is never read (`read`): a weight of zero is not enough, for 0 * NaN is NaN.

The weights are drawn from a seed. Wide queries make attention pick single positions instead of averaging all away, so
every token of a prompt matters, and a block that was mixed up shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from neuron_sched import NeuronConfig

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [tokens, heads, head size], keys and values [tokens, kv heads, head size] -> [tokens, heads * head size]."""


class TinyLlama(nn.Module):
    """The model and its KV cache, for the blocks of `config`.

    `kv_cache` is float32 [layers, keys and values, slots, kv heads, head size] and has (num_blocks + 1) * block_size
    slots; those of block 0 are never written.
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
        draw = torch.Generator().manual_seed(seed)
        self.embed_tokens = nn.Embedding(vocab_size, width, _weight=drawn(vocab_size, width, width**0.5, draw))
        self.layers = nn.ModuleList(Layer(width, inner, heads, kv_heads, draw) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.lm_head = linear(width, vocab_size, 3.0, draw)
        slots = (config.num_blocks + 1) * config.block_size
        # Not persistent: the cache is no weight, a state dict leaves it out.
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
        sampling_params: Tensor,  # for whoever samples on the device; here the caller does
        cached_seq_len: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        context_lens: Tensor | None = None,
    ) -> Tensor:
        """Logits [rows of logits_index, vocab_size] of a prefill or, with `context_lens`, of a decode.

        The tensors are those of `Batch`. Keys and values of all tokens with a slot are in the cache afterwards.
        """
        key_positions = torch.arange(block_table.shape[1] * self.block_size)
        if context_lens is None:
            filled = key_positions < cached_seq_len + cu_seqlens.diff()[:, None]
            # One group: T tokens, and the contexts of all P requests one behind the other. Padding is nobody's token.
            token = torch.arange(input_ids.shape[0])[:, None]
            own = (cu_seqlens[:-1] <= token) & (token < cu_seqlens[1:])
            causal = key_positions <= positions[:, None]
            visible = (own[:, :, None] & causal[:, None]).reshape(1, input_ids.shape[0], -1)
        else:
            filled = key_positions < context_lens[:, None]
            visible = filled[:, None]  # B groups: one token and its own context, all of which it sees
        step = PagedAttention(slot_mapping, block_table, filled, visible)
        attentions = [functools.partial(step, cache) for cache in self.kv_cache.unbind()]
        return self.lm_head(self.hidden(input_ids, positions, attentions)[logits_index])

    def hidden(self, input_ids: Tensor, positions: Tensor, attentions: Sequence[Attention]) -> Tensor:
        """What the layers make of the tokens: [tokens, width]."""
        x = self.embed_tokens(input_ids)
        for layer, attention in zip(self.layers, attentions, strict=True):
            x = layer(x, positions, attention)
        return self.norm(x)


class Layer(nn.Module):
    """Attention and a gated MLP, each behind a norm and beside a residual."""

    def __init__(self, width: int, inner: int, heads: int, kv_heads: int, draw: torch.Generator) -> None:
        super().__init__()
        self.head_size = width // heads
        self.input_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.q_proj = linear(width, width, 3.0, draw)
        self.k_proj = linear(width, self.head_size * kv_heads, 1.0, draw)
        self.v_proj = linear(width, self.head_size * kv_heads, 2.0, draw)
        self.o_proj = linear(width, width, 2.0, draw)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=1e-5)
        self.gate_proj = linear(width, inner, 1.0, draw)
        self.up_proj = linear(width, inner, 1.0, draw)
        self.down_proj = linear(inner, width, 1.0, draw)

    def forward(self, x: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        h = self.input_layernorm(x)
        q, k, v = (proj(h).unflatten(-1, (-1, self.head_size)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        x = x + self.o_proj(attention(rotated(q, positions), rotated(k, positions), v))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(h)) * self.up_proj(h))


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding: [tokens, heads, head size] turned by angles that grow with the position."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10000.0 ** (-torch.arange(half) / half)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


@dataclass(frozen=True)
class PagedAttention:
    """Attention of one step's tokens over the KV cache. Tokens and contexts lie in groups that do not see each other.

    `filled` [requests, keys]: where a request has a key; `visible` [groups, queries, keys]: which keys a query sees.
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
    """Puts each token's `new` into its slot, in place; slot -1 writes nothing.

    A graph of fixed shape writes as many rows as there are tokens. So those of slot -1 write into slot 0 the bits that
    it has: it lies in block 0, which nobody owns, and no two rows write different values to one slot.
    """
    real = (slot_mapping >= 0)[:, None, None]
    cache.index_copy_(0, slot_mapping.clamp(min=0), torch.where(real, new, cache[:1]))


def read(cache: Tensor, block_table: Tensor, filled: Tensor) -> Tensor:
    """Each request's context in order of position: [requests, keys, kv heads, head size], zero where not `filled`.

    So nothing comes from behind a block id of -1 or from the unused rest of a block, whatever lies there.
    """
    blocks = cache.unflatten(0, (-1, filled.shape[1] // block_table.shape[1]))
    return blocks[block_table.clamp(min=0)].flatten(1, 2).masked_fill(~filled[:, :, None, None], 0.0)


def attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Softmax attention in groups: [groups, queries, heads, head size] -> [groups, queries, heads * head size].

    The lowest number instead of minus infinity: what sees nothing gets a mean of nothing real, but no NaN.
    """
    queries = queries.unflatten(2, (keys.shape[2], -1)) / keys.shape[3] ** 0.5
    scores = torch.einsum("nqkgd,nlkd->nkgql", queries, keys)
    weights = scores.masked_fill(~visible[:, None, None], torch.finfo(scores.dtype).min).softmax(-1)
    return torch.einsum("nkgql,nlkd->nqkgd", weights, values).flatten(2)


def drawn(rows: int, columns: int, gain: float, draw: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=draw) * (gain / columns**0.5)


def linear(columns: int, rows: int, gain: float, draw: torch.Generator) -> nn.Linear:
    layer = nn.Linear(columns, rows, bias=False)
    layer.weight = nn.Parameter(drawn(rows, columns, gain, draw))
    return layer


@torch.no_grad()
def dense_logits(model: TinyLlama, tokens: Sequence[int]) -> Tensor:
    """Logits [tokens, vocab_size] of one sequence by dense causal attention: no cache, no padding, nobody else."""

    def dense(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (queries, keys, values))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    ids = torch.tensor(tokens)
    return model.lm_head(model.hidden(ids, torch.arange(len(tokens)), [dense] * len(model.layers)))


def generate_reference(
    model: TinyLlama, prompt: Sequence[int], n: int, stop_token_ids: Sequence[int] = ()
) -> list[int]:
    """At most `n` greedy tokens after `prompt`, the last one a stop token if one came: what any batching must give."""
    out: list[int] = []
    while len(out) < n and not (out and out[-1] in stop_token_ids):
        out.append(int(dense_logits(model, [*prompt, *out])[-1].argmax()))
    return out
