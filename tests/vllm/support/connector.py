"""A KV connector whose remote blocks a test determines. vLLM loads it by the name of this module."""

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class FakeMetadata(KVConnectorMetadata):
    """The token counts and the finished ids of the output that the metadata was built for."""

    def __init__(self, scheduled, finished):
        self.scheduled = scheduled
        self.finished = finished


class FakeConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler side of a KV connector.

    `answers[request_id]` = (remote tokens, whether they load asynchronously). `None` remote tokens: not known yet.
    """

    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        self.answers = {}
        self.lookups = []  # request ids, in order
        self.built = []  # metadata, in order

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.lookups.append(request.request_id)
        remote, asynchronous = self.answers.get(request.request_id, (0, False))
        if remote is None:
            return None, False
        external = max(0, remote - num_computed_tokens)
        return external, asynchronous and external > 0

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        meta = FakeMetadata(dict(scheduler_output.num_scheduled_tokens), set(scheduler_output.finished_req_ids))
        self.built.append(meta)
        return meta

    def request_finished(self, request, block_ids):
        return False, None

    def request_finished_all_groups(self, request, block_ids):
        return False, None

    def _worker_method(self, *args, **kwargs):
        """Stand in for the worker side's methods. They are abstract in vLLM's base class, and no test calls them."""
        raise NotImplementedError

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _worker_method
