"""A stand-in for vLLM's connector to a node that encodes images."""


class EncoderConnector:
    """A connector to a remote encoder. `pending` has the ids of the requests whose images are not encoded yet."""

    def __init__(self):
        self.pending = set()
        self.built = 0

    def ensure_cache_available(self, request, num_computed_tokens):
        return request.request_id not in self.pending

    def build_connector_meta(self, scheduler_output):
        self.built += 1
        return f"meta {self.built}"

    def request_finished(self, request):
        return False, None

    def take_unavailable_requests(self):
        return ()

    def get_ec_connector_stats(self):
        return None

    def has_pending_push_work(self):
        return False
