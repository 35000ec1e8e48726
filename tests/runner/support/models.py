"""A model whose logits can be worked out by hand, and variants of it with one fault each."""

import torch
from torch import nn

from neuron_sched import NeuronConfig, PaddedInputs

VOCAB = 11
CONFIG = NeuronConfig(
    max_num_seqs=4,
    max_num_batched_tokens=32,
    num_batched_tokens_buckets=[16, 32],
    max_model_len=64,
    block_size=8,
    num_blocks=16,
    max_prefills_per_batch=2,
    decode_context_length_buckets=[32, 64],
)
SHAPES = PaddedInputs(CONFIG).shapes


class WeightedSum(nn.Module):
    """The logits of a row are the weighted sum of the KV entries of its context.

    The KV entry of a token is its row of `table`. The entry at position p has weight p + 1.
    """

    def __init__(self, config: NeuronConfig = CONFIG):
        super().__init__()
        self.block_size = config.block_size
        generator = torch.Generator().manual_seed(3)
        # Small integers, so that sums are exact in any order.
        self.table = nn.Parameter(torch.randint(-9, 9, (VOCAB, VOCAB), generator=generator).float())
        self.register_buffer("kv", torch.zeros((config.num_blocks + 1) * config.block_size, VOCAB))

    def forward(self, *, input_ids, slot_mapping, block_table, context_lens=None, **others):
        self.write(slot_mapping, self.table[input_ids].to(self.kv.dtype))
        if context_lens is None:
            context_lens = others["cached_seq_len"][:, 0] + others["cu_seqlens"].diff()
        positions = torch.arange(block_table.shape[1] * self.block_size)
        context = self.kv.unflatten(0, (-1, self.block_size))[block_table.clamp(min=0)].flatten(1, 2).float()
        context = context.masked_fill((positions >= context_lens[:, None])[:, :, None], 0.0)
        return torch.einsum("rpv,p->rv", context, (positions + 1).to(context.dtype))

    def write(self, slots, new):
        """Write the entries to their slots. A token with slot -1 writes the content of slot 0 back to slot 0."""
        has_slot = (slots >= 0)[:, None]
        self.kv.index_copy_(0, slots.clamp(min=0), torch.where(has_slot, new, self.kv[:1]))


def expected(model: WeightedSum, tokens) -> list[float]:
    """Return the logits of the last of these tokens."""
    return sum((i + 1) * model.table[token] for i, token in enumerate(tokens)).tolist()


class LastSlotWriter(WeightedSum):
    """Writes for slot -1, which indexes the last slot."""

    def write(self, slots, new):
        self.kv[slots] = new


class LastSlotZeroer(WeightedSum):
    """Writes a zero for slot -1. In an empty cache the write changes nothing."""

    def write(self, slots, new):
        self.kv[slots] = torch.where((slots >= 0)[:, None], new, 0)


class DecodeWriter(WeightedSum):
    """Writes for slot -1 in decode steps only."""

    def forward(self, *, slot_mapping, context_lens=None, **others):
        if context_lens is not None:
            self.kv[slot_mapping] = 5.0
        return super().forward(slot_mapping=slot_mapping, context_lens=context_lens, **others)


class InputChanger(WeightedSum):
    """Changes an input in place."""

    def write(self, slots, new):
        has_slot = (slots >= 0)[:, None]
        slots.clamp_(min=0)
        self.kv.index_copy_(0, slots, torch.where(has_slot, new, self.kv[:1]))


class WeightWriter(WeightedSum):
    """Writes to a parameter, in which it counts its calls."""

    def __init__(self):
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, **tensors):
        self.seen += 1
        return super().forward(**tensors)


class PairReturner(WeightedSum):
    """Returns a tuple instead of the logits."""

    def forward(self, **tensors):
        return super().forward(**tensors), self.kv


class NoneReturner(WeightedSum):
    """Returns `None`."""

    def forward(self, **tensors):
        super().forward(**tensors)


class NaNPadding(WeightedSum):
    """Returns NaN as the logits of padding rows (0 / 0)."""

    def forward(self, *, context_lens=None, **tensors):
        logits = super().forward(context_lens=context_lens, **tensors)
        return logits if context_lens is None else logits * (context_lens / context_lens)[:, None]
