"""Speculative decoding with draft tokens."""

from vllm.config import SpeculativeConfig
from vllm.v1.outputs import ModelRunnerOutput

from tests.vllm.support.harness import computed_before

DRAFTS = 3


def enable_drafts(vllm_config):
    """Configure speculative decoding with `DRAFTS` draft tokens a step."""
    vllm_config.speculative_config = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=DRAFTS,
        prompt_lookup_max=4,
        prompt_lookup_min=2,
        target_model_config=vllm_config.model_config,
        target_parallel_config=vllm_config.parallel_config,
    )


def finish_with_drafts(sched, out, num_sampled):
    """Call `update_from_output()` with sampled tokens for each request whose prompt is computed.

    `num_sampled(request_id, num_drafts)` returns their number, the accepted drafts included.
    """
    ids, before = list(out.num_scheduled_tokens), computed_before(out)
    tokens = []
    for rid in ids:
        r = sched.requests.get(rid)
        prefilling = r is not None and before[rid] + out.num_scheduled_tokens[rid] < r.num_prompt_tokens
        drafts = len(out.scheduled_spec_decode_tokens.get(rid, ()))
        tokens.append([] if r is None or prefilling else [7] * num_sampled(rid, drafts))
    return sched.update_from_output(
        out,
        ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        ),
    )
