"""A KV connector of which a test decides what it holds. vLLM loads it by the name of this module."""

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class FakeMetadata(KVConnectorMetadata):
    def __init__(self, scheduled, finished):
        self.scheduled = scheduled
        self.finished = finished


class FakeConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side only. `answers[id]` = (tokens held remotely or None, whether they are loaded beside)."""

    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        self.answers = {}
        self.asked = []
        self.allocated = []
        self.built = []

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.asked.append(request.request_id)
        held, beside = self.answers.get(request.request_id, (0, False))
        if held is None:
            return None, False
        more = max(0, held - num_computed_tokens)
        return more, beside and more > 0

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.allocated.append((request.request_id, num_external_tokens))

    def build_connector_meta(self, scheduler_output):
        meta = FakeMetadata(dict(scheduler_output.num_scheduled_tokens), set(scheduler_output.finished_req_ids))
        self.built.append(meta)
        return meta

    def request_finished(self, request, block_ids):
        return False, None

    def request_finished_all_groups(self, request, block_ids):
        return False, None

    def start_load_kv(self, forward_context, **kwargs):
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name):
        raise NotImplementedError

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        raise NotImplementedError

    def wait_for_save(self):
        raise NotImplementedError
