"""Bodies at the limits: a request of 32 MiB (what a worker takes at most) and a reply of more than 64 MiB."""

import msgspec

from bench.cases import GENERATE, MODEL, Case
from bench.load import post, run
from bench.processes import cpu_seconds, resident_bytes
from bench.results import Large
from bench.targets import Target

MIB = 1 << 20
#: The context that these need, in tokens.
MAX_MODEL_LEN = 16 * MIB

_REQUEST_BYTES = 32 * MIB
_REPLY_BYTES = 64 * MIB
_TOP_LOGPROBS = 20
_OUTPUT = 70_000


def large_request(target: Target) -> Large:
    """A request body of exactly 32 MiB: a prompt of some eight million tokens.

    Raises: `LoadFailed`, `WrongReply`.
    """
    case = Case("request body", prompt=0, output=4, concurrency=1, requests=1)
    empty = {"model": MODEL, "token_ids": [], "sampling_params": {"max_tokens": case.output, "temperature": 1.0, "ignore_eos": True}}
    head, tail = msgspec.json.encode(empty).split(b"[]")
    room = _REQUEST_BYTES - len(head) - len(tail) - 1
    body = head + b"[" + b"100," * (room // 4 - 1) + b"100" + b" " * (room - room // 4 * 4) + b"]" + tail
    return _exchange(case, target, post("localhost", GENERATE, body), size=len(body))


def large_reply(target: Target) -> Large:
    """A reply of at least 64 MiB: 70,000 tokens with 20 candidates each.

    Raises: `LoadFailed`, `WrongReply`.
    """
    case = Case("reply body", prompt=200, output=_OUTPUT, concurrency=1, requests=1, logprobs=_TOP_LOGPROBS)
    return _exchange(case, target, target.requests(case)[0], size=None)


def _exchange(case: Case, target: Target, request: bytes, size: int | None) -> Large:
    cpu, resident = cpu_seconds(target.pids), resident_bytes(target.pids)
    load = run(target.address, [request], count=1, concurrency=1)
    cpu, resident = cpu_seconds(target.pids) - cpu, resident_bytes(target.pids) - resident
    body, _ = load.replies[0].body()
    case.check(body, "generate")
    return Large(case.name, target.name, len(body) if size is None else size, load.seconds, cpu if target.pids else None, resident)
