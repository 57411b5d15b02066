"""Prefill/decode hand-off, as far as the parameters go: what a NIXL connector would answer. No KV cache moves."""

from collections.abc import Mapping
from typing import Any

from plugins.stand_in.engine.checks import Plan
from plugins.stand_in.options import Options


def handed_over(plan: Plan, cached_tokens: int, options: Options) -> Mapping[str, Any] | None:
    """The parameters that a prefill call returns for its decode call; None unless `do_remote_decode` was asked for."""
    params = plan.call.kv_transfer_params
    if not (params and params.get("do_remote_decode")):
        return None
    blocks = -(-len(plan.prompt) // options.block_size)
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": options.instance_id,
        "remote_request_id": plan.call.request_id,
        "remote_block_ids": [list(range(blocks))],
        "remote_host": options.host,
        "remote_port": 5600,
        "tp_size": 1,
        "remote_prefill_cached_tokens": cached_tokens,
    }


def cached_remotely(plan: Plan) -> int | None:
    """The cached tokens that a decode call reports: those of its prefill. None for any other call."""
    params = plan.call.kv_transfer_params
    if not (params and params.get("do_remote_prefill")):
        return None
    return int(params.get("remote_prefill_cached_tokens") or 0)
