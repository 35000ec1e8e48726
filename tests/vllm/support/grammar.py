"""Stand-ins for the grammars of structured output."""

from vllm.v1.structured_output.backend_types import StructuredOutputGrammar


class FakeGrammar(StructuredOutputGrammar):
    """A grammar that accepts every token. Its bitmask row is filled with `mask`."""

    def __init__(self, mask=1):
        self.mask = mask

    def accept_tokens(self, request_id, tokens):
        return True

    def validate_tokens(self, tokens):
        return tokens

    def rollback(self, num_tokens):
        pass

    def fill_bitmask(self, bitmask, batch_index):
        bitmask[batch_index].fill_(self.mask)

    def is_terminated(self):
        return False

    def reset(self):
        pass


class FakeBackend:
    """A grammar backend that can only allocate bitmasks, of 2 int32 words a row."""

    def allocate_token_bitmask(self, max_num_seqs):
        import torch

        return torch.zeros((max_num_seqs, 2), dtype=torch.int32)

    def destroy(self):
        pass


def set_compiled_grammar(req, grammar=None):
    """Set the compiled grammar of a waiting request, so that it is no longer blocked. Return the request."""
    req.structured_output_request.grammar = grammar or FakeGrammar()
    return req
