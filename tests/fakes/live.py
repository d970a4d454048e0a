"""A service's live state for tests, without a service."""

from service.observability.live import LiveState, PhaseLive, ReplicaLive


def make_replica(replica="e1", model="tiny", **numbers):
    """One engine; what is not given is some number of its own."""
    told = {
        "pushed_s": 1.0,
        "attention_backend": "torch_native",
        "page_size": 16,
        "num_running": 2,
        "num_waiting": 3,
        "num_queued_tokens": 40,
        "num_running_tokens": 500,
        "num_pages": 100,
        "num_used_pages": 25,
        "num_evictable_pages": 50,
        "num_steps": 10,
        "num_prompt_tokens": 80,
        "num_cached_prompt_tokens": 20,
        "num_output_tokens": 30,
        "num_draft_tokens": 0,
        "num_accepted_draft_tokens": 0,
        "phases": [PhaseLive("decode", 10, 0.02, None)],
    }
    return ReplicaLive(replica=replica, model=model, **{**told, **numbers})


class FakeReader:
    """A MetricsReader whose state a test sets."""

    def __init__(self, state=None):
        self.state = state or LiveState(5, [make_replica()])

    async def live(self):
        return self.state

    async def text(self):
        return b"# HELP tessera_steps Steps run.\n"
