"""What calls are told apart by: the first of these that a call has, in the order in which the routers of vLLM's neighbours look.

`X-Session-ID`, `X-User-ID`, `X-Tenant-ID`, `X-Request-ID`, `X-Correlation-ID`, `X-Trace-ID`; in the body `session_params.session_id`,
`user`, `session_id`, `user_id`; else the prompt itself.
"""

from hashlib import blake2b
from typing import Final

import msgspec
from msgspec import Raw, Struct

from core import Call, refusing

_HEADERS: Final = ("x-session-id", "x-user-id", "x-tenant-id", "x-request-id", "x-correlation-id", "x-trace-id")
_FIELDS: Final = ("session_params", "user", "session_id", "user_id")
_NOTE: Final = "consistent-hash"
_64_BITS: Final = (1 << 64) - 1


class _SessionParams(Struct):
    session_id: str | None = None


_session_params = msgspec.json.Decoder(_SessionParams | None)
_strings = msgspec.json.Decoder(str | None)


def claim_key(call: Call) -> None:
    """Take the fields that may be the key out of the body, and note the first. Those of a relayed call stay there: the worker sees them.

    Raises: `BadRequest` for a field of another type; one of a relayed call is the worker's to judge.
    """
    for field in _FIELDS:
        raw = call.unclaimed.get(field)
        if raw is None:
            continue
        if call.relayed:
            try:
                value = _decode(field, raw)
            except msgspec.MsgspecError:
                continue
        else:
            del call.unclaimed[field]
            with refusing(field):
                value = _decode(field, raw)
        if value and _NOTE not in call.notes:
            name = "session_params.session_id" if field == "session_params" else field
            call.notes[_NOTE] = (name, _hash(value.encode()))


def key_of(call: Call) -> tuple[str, int]:
    """The name of the key, and a number that stands for its value."""
    for name in _HEADERS:
        if value := call.headers.get(name):
            return name, _hash(value.encode())
    if note := call.notes.get(_NOTE):
        return note
    if call.relayed:
        return "the body", _hash(b"\0".join(map(bytes, call.unclaimed.values())))
    # Of numbers, Python's hash is the same in every process; and ten times as fast as one over their bytes.
    return "the prompt", hash(tuple(call.token_ids)) & _64_BITS


def _decode(field: str, raw: Raw) -> str | None:
    if field != "session_params":
        return _strings.decode(raw)
    params = _session_params.decode(raw)
    return params.session_id if params else None


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest())
