"""Where clients write the salt.

The top level is vLLM's own place. Prime-RL's clients write it into `sampling_params`, or, because they hand the arguments of a client
library on as they are, under the literal key `extra_body`; Dynamo's write it into `nvext`; a header reaches routes whose bodies have no
place for it.
"""

from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw

from core import BadRequest, Call

HEADER: Final = "X-Cache-Salt"
_HEADER: Final = HEADER.lower()
_KEY: Final = "cache_salt"
#: Objects in the body that may hold a salt. What else they hold is for other plugins. The core has taken `sampling_params` apart, except
#: in the body of a relayed route.
_OBJECTS: Final = ("sampling_params", "extra_body", "nvext")

_members: Final = msgspec.json.Decoder(dict[str, Raw])
_texts: Final = msgspec.json.Decoder(str | None)


class Found(NamedTuple):
    """What stands in one place."""

    #: In an error's prose.
    place: str
    #: Of the field in the request.
    path: str
    value: Any


def may_hold_salts(call: Call) -> bool:
    """Whether `take_salts` could find anything: the cheap question that every call is asked."""
    return bool(call.cache_salt or call.unclaimed or call.unclaimed_sampling) or _HEADER in call.headers


def take_salts(call: Call) -> list[Found]:
    """Everything that the client wrote as a salt; nulls are left out, as they mean the same as nothing.

    Takes it out of `call.unclaimed` and `call.unclaimed_sampling`, with the objects that hold nothing else.

    Raises: `BadRequest` for an object that isn't JSON or is nested too deeply, and for a header that isn't UTF-8.
    """
    found: list[Found] = []
    if call.cache_salt:
        found.append(Found("the body", _KEY, call.cache_salt))
    if call.unclaimed_sampling:
        path = f"sampling_params.{_KEY}"
        found.append(Found(path, path, call.unclaimed_sampling.pop(_KEY, None)))
    for name in _OBJECTS:
        if name in call.unclaimed:
            path = f"{name}.{_KEY}"
            found.append(Found(path, path, _take_member(call.unclaimed, name)))
    if (text := call.headers.get(_HEADER)) is not None:
        found.append(Found(f"the header {HEADER}", _HEADER, _as_utf8(text)))
    return [each for each in found if each.value is not None]


def _take_member(unclaimed: dict[str, Raw], name: str) -> Any:
    """The salt in an object of the body; what is no object stays, and is refused by whoever reads it."""
    try:
        members = _members.decode(unclaimed[name])
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"{name}: it can't be read: {error}", param=name) from error
    raw = members.pop(_KEY, None)
    if raw is None:
        return None
    if members:
        unclaimed[name] = Raw(msgspec.json.encode(members))
    else:
        del unclaimed[name]
    return _value(raw)


def _value(raw: Raw) -> Any:
    """A string or null as it is; anything else, however large, as something that is neither."""
    try:
        return _texts.decode(raw)
    except msgspec.MsgspecError:
        return raw


def _as_utf8(text: str) -> str:
    """A header as the text that its bytes are, so that it can equal a salt in the body; servers hand headers over as Latin-1."""
    try:
        return text.encode("latin-1").decode()
    except UnicodeError as error:
        raise BadRequest(f"{_HEADER}: it is not UTF-8", param=_HEADER) from error
