"""What 12 MB of routed experts cost: a call whose reply carries them, and the same call without."""

from functools import partial

import msgspec

from bench.cases import GENERATE, MODEL, WrongReply
from bench.load import post, run
from bench.processes import cpu_seconds, resident_bytes
from bench.results import Large
from bench.targets import Target
from tests.workers.scripted_engine.behaviour import EXPERTS_PER_TOKEN, MOE_LAYERS, Behaviour

_TOKENS = 3_000_000
_OUTPUT = 4
_ROW_BYTES = MOE_LAYERS * EXPERTS_PER_TOKEN


def _exchange(target: Target, *, routed: bool) -> Large:
    """Raises: `LoadFailed`, `WrongReply`."""
    prompt = [Behaviour.ROUTED_EXPERTS if routed else 100, *[100] * (_TOKENS - 1)]
    # `stream_interval` changes nothing here, but sends both calls over the same wire.
    sampling = {"max_tokens": _OUTPUT, "temperature": 1.0, "ignore_eos": True, "stream_interval": 1}
    body = msgspec.json.encode({"model": MODEL, "token_ids": prompt, "sampling_params": sampling})
    cpu, resident = cpu_seconds(target.pids), resident_bytes(target.pids)
    load = run(target.address, [post("localhost", GENERATE, body)], count=1, concurrency=1)
    cpu, resident = cpu_seconds(target.pids) - cpu, resident_bytes(target.pids) - resident
    reply, _ = load.replies[0].body()
    least = (_TOKENS + _OUTPUT - 1) * _ROW_BYTES * 4 // 3 if routed else 0
    if len(reply) < least or reply.count(b'"finish_reason":"length"') != 1:
        raise WrongReply(f"{len(reply)} bytes of reply where {least} are the least: {reply[:200]!r}")
    name = "12 MB of routed experts" if routed else "the same call without"
    return Large(name, target.name, len(reply), load.seconds, cpu if target.pids else None, resident)


#: The exchanges, in the order in which they are measured.
EXCHANGES = {"call without routed experts": partial(_exchange, routed=False), "routed experts": partial(_exchange, routed=True)}
