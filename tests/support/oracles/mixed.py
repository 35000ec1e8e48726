"""Oracle of `Scheduler`: a slow, obvious token-budget scheduler in pure Python."""

from collections import deque
from collections.abc import Hashable


class MixedReq:
    """A request. `prefilled` counts its computed prompt tokens, `generated` its output tokens."""

    __slots__ = ("generated", "max_new", "prefilled", "prompt_len", "rid", "running")

    def __init__(self, rid: Hashable, prompt_len: int, max_new: int, prefilled: int = 0, generated: int = 0) -> None:
        self.rid = rid
        self.prompt_len = prompt_len
        self.max_new = max_new
        self.prefilled = prefilled
        self.generated = generated
        self.running = False


class MixedOracle:
    """Same interface and same results as `neuron_sched.Scheduler`, but arguments are not validated."""

    def __init__(self, token_budget: int, max_seqs: int, kv_tokens: int) -> None:
        self.token_budget = token_budget
        self.max_seqs = max_seqs
        self.kv_tokens = kv_tokens
        self.waiting: deque[MixedReq] = deque()
        self.running: list[MixedReq] = []
        self.reserved = 0
        self.planned: list[tuple[MixedReq, int]] | None = None

    def add(self, req: MixedReq) -> None:
        if req.prompt_len + req.max_new > self.kv_tokens:
            raise ValueError("never fits")
        if any(live.rid == req.rid for live in [*self.waiting, *self.running]):
            raise ValueError("already live")
        self.waiting.append(req)

    def schedule(self) -> list[tuple[MixedReq, int]]:
        plan = []
        budget = self.token_budget
        for req in self.running:
            if budget > 0 and req.prefilled == req.prompt_len:
                plan.append((req, 1))
                budget -= 1
        for req in self.running:
            if budget > 0 and req.prefilled < req.prompt_len:
                tokens = min(req.prompt_len - req.prefilled, budget)
                plan.append((req, tokens))
                budget -= tokens
        while self.waiting and budget > 0 and len(self.running) < self.max_seqs:
            head = self.waiting[0]
            if self.reserved + head.prompt_len + head.max_new > self.kv_tokens:
                break
            self.waiting.popleft()
            self.running.append(head)
            head.running = True
            self.reserved += head.prompt_len + head.max_new
            tokens = min(max(head.prompt_len - head.prefilled, 1), budget)
            plan.append((head, tokens))
            budget -= tokens
        self.planned = plan
        return list(plan)

    def complete(self, plan: list[tuple[MixedReq, int]]) -> list[Hashable]:
        if self.planned is None or plan != self.planned:
            raise ValueError("not the last plan")
        self.planned = None
        emitted = []
        any_finished = False
        for req, tokens in plan:
            if not req.running:
                continue
            if req.prefilled < req.prompt_len:
                req.prefilled += tokens
                if req.prefilled < req.prompt_len:
                    continue
            req.generated += 1
            emitted.append(req.rid)
            if req.generated == req.max_new:
                any_finished = True
                self._release(req)
        if any_finished:
            self.running = [req for req in self.running if req.running]
        return emitted

    def _release(self, req: MixedReq) -> None:
        req.running = False
        self.reserved -= req.prompt_len + req.max_new

    def cancel(self, rid: Hashable) -> bool:
        for req in self.waiting:
            if req.rid == rid:
                self.waiting.remove(req)
                return True
        for req in self.running:
            if req.rid == rid:
                self.running.remove(req)
                self._release(req)
                return True
        return False
