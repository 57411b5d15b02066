"""What calls are told apart by: the first of these that a call has, in the order in which the routers of vLLM's neighbours look.

`X-Session-ID`, `X-User-ID`, `X-Tenant-ID`, `X-Request-ID`, `X-Correlation-ID`, `X-Trace-ID`; in the body `session_params.session_id`,
`user`, `session_id`, `user_id`; else the prompt itself.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final

import msgspec
from msgspec import Raw, Struct

from core import Call

_HEADERS: Final = ("x-session-id", "x-user-id", "x-tenant-id", "x-request-id", "x-correlation-id", "x-trace-id")
_FIELDS: Final = ("session_params", "user", "session_id", "user_id")
#: Of a prompt of more than twice as many tokens, so many count, evenly spread, and as many at its end: its key then takes no longer.
_COUNTED: Final = 2048
_64_BITS: Final = (1 << 64) - 1


class _SessionParams(Struct):
    session_id: str | None = None


_session_params = msgspec.json.Decoder(_SessionParams | None)
_strings = msgspec.json.Decoder(str | None)


def key_of(call: Call) -> tuple[str, int]:
    """The name of the key, and a number that stands for its value."""
    for name in _HEADERS:
        if value := call.headers.get(name):
            return name, _hash(value.encode())
    for name, value in call.owner.items():
        return name, _hash(value.encode())
    if call.relayed:
        return _relayed_key(call.unclaimed)
    return "the prompt", _prompt_key(call.token_ids)


def _prompt_key(token_ids: Sequence[int]) -> int:
    """Of numbers, CPython's hash is the same in every process; and ten times as fast as one over their bytes."""
    length = len(token_ids)
    if length <= 2 * _COUNTED:
        return hash(tuple(token_ids)) & _64_BITS
    return hash((length, tuple(token_ids[:: length // _COUNTED]), tuple(token_ids[-_COUNTED:]))) & _64_BITS


def _relayed_key(body: Mapping[str, Raw]) -> tuple[str, int]:
    """The first of the fields, or all of the body. A field of another type is the worker's to judge."""
    for field in _FIELDS:
        if raw := body.get(field):
            try:
                value = _decode(field, raw)
            except msgspec.MsgspecError:
                continue
            if value:
                return "session_params.session_id" if field == "session_params" else field, _hash(value.encode())
    return "the body", _hash(b"\0".join(map(bytes, body.values())))


def _decode(field: str, raw: Raw) -> str | None:
    if field != "session_params":
        return _strings.decode(raw)
    params = _session_params.decode(raw)
    return params.session_id if params else None


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest())
