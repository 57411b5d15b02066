"""Prefill/decode hand-off: what a NIXL connector would answer, and the blocks that a prefill keeps until its decode call has them.

Nothing is moved but messages, because there is no KV: the decode's engine asks the prefill's over TCP, as NIXL's agents would, and only
then are the blocks there, or not.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from plugins.stand_in.engine.checks import Plan
from plugins.stand_in.options import Options


class Handoffs:
    """The prompts whose blocks are kept for another engine, until it has them, or their lease is over.

    `port` is where the other engine asks for them; the server sets it. `rank` is this one's. `clock` reads seconds.
    """

    def __init__(self, options: Options, rank: int = 0, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.port = 0
        self.expired = 0
        self._options = options
        self._engine_id = options.instance_id if options.data_parallel_size == 1 else f"{options.instance_id}_dp{rank}"
        self._clock = clock
        self._kept: dict[str, tuple[int, float]] = {}

    @property
    def blocks(self) -> int:
        """How many blocks are kept."""
        self._expire()
        return sum(blocks for blocks, _ in self._kept.values())

    def hand_over(self, plan: Plan, cached_tokens: int) -> Mapping[str, Any] | None:
        """The parameters that a prefill call returns for its decode call, whose blocks are kept from now on; None unless
        `do_remote_decode` was asked for.
        """
        params = plan.call.kv_transfer_params
        if not (params and params.get("do_remote_decode")):
            return None
        blocks = -(-len(plan.prompt) // self._options.block_size)
        request_id = f"{plan.call.request_id}-{uuid4().hex[:8]}"
        self._kept[request_id] = blocks, self._clock() + self._options.kv_lease
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_request_id": request_id,
            "remote_block_ids": [list(range(blocks))],
            "remote_host": self._options.host,
            "remote_port": self.port,
            "tp_size": 1,
            "remote_prefill_cached_tokens": cached_tokens,
        }

    def has(self, request_id: str) -> bool:
        """Whether the blocks of this prefill are still kept."""
        self._expire()
        return request_id in self._kept

    def free(self, request_id: str) -> None:
        """The other engine has them."""
        self._kept.pop(request_id, None)

    def _expire(self) -> None:
        now = self._clock()
        for request_id in [request_id for request_id, (_, end) in self._kept.items() if end <= now]:
            del self._kept[request_id]
            self.expired += 1


def remote_blocks(plan: Plan) -> Mapping[str, Any] | None:
    """The parameters of a decode call that says where the blocks of its prompt are; None for any other call."""
    params = plan.call.kv_transfer_params
    if not (params and params.get("do_remote_prefill")):
        return None
    wanted = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
    return params if all(params.get(key) for key in wanted) else None


def cached_remotely(plan: Plan) -> int | None:
    """The cached tokens that a decode call reports: those of its prefill. None for any other call."""
    params = plan.call.kv_transfer_params
    if not (params and params.get("do_remote_prefill")):
        return None
    return int(params.get("remote_prefill_cached_tokens") or 0)
