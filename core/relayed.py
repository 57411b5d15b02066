"""The body of a call that goes to a worker as it is (`Call.relayed`)."""

from typing import Any

import msgspec
from msgspec import Raw, Struct

from core.call import Call

_encoder = msgspec.json.Encoder()


class RelayedBody(Struct, frozen=True):
    """A JSON object whose members nobody has looked into, but for the two that a call's plugins may change."""

    data: bytes
    #: In the client's order.
    members: dict[str, Raw]
    #: What the client wrote; empty when it did not say.
    model: str
    cache_salt: str

    def lower(self, call: Call) -> dict[str, Any]:
        """The members that a worker is to see. `model` is the call's and `cache_salt` its identity's, where those are not what the client
        wrote; over HTTP an adapter is a model.
        """
        request: dict[str, Any] = dict(self.members)
        _put(request, "model", self.model, call.adapter or call.model)
        _put(request, "cache_salt", self.cache_salt, call.identity.namespace)
        return request

    def encode(self, request: dict[str, Any]) -> bytes:
        """The body for these members: the client's own bytes when they are the client's members, else with every untouched value byte for
        byte.
        """
        return self.data if request == self.members else _encoder.encode(request)


def _put(request: dict[str, Any], key: str, before: str, now: str) -> None:
    if now == before:
        return
    if now:
        request[key] = now
    else:
        request.pop(key, None)
