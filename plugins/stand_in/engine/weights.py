"""Which weights the engine has, and the states that a weight update goes through."""

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from plugins.stand_in.engine import transfer


class Weights:
    """The weights of the base model: an identity that decides the tokens, and a version that is only a label.

    An update is `init_transfer` once, then `start`, any number of `update` and `finish`. From `start` until a `finish` that
    succeeds the parameters are meta tensors (`meta`): a forward pass would crash the engine. A failed `update` ends the update and
    leaves it so; what helps is a whole new one.

    The identity after a `finish` that names a version depends on that version and on what was sent, so workers that took the same
    update agree, whatever they had before. Without a version it depends on what they had before, too.

    Every method raises ValueError with the reason when the step is not possible.
    """

    def __init__(self, backend: str, world_size: int) -> None:
        self.backend = backend
        self._world_size = world_size
        self.version = "default"
        self.identity = _hash(b"initial")
        self.meta = False
        self._transfer_ready = False
        self._updating = False
        self._received: list[bytes] = []

    def init_transfer(self, info: Mapping[str, Any]) -> None:
        """Join a trainer; a second time replaces the first."""
        transfer.check_init(self.backend, info)
        self._transfer_ready = True

    def shut_down_transfer(self) -> None:
        """Leave the trainer."""
        if self._updating:
            raise ValueError("a weight update is running: finish it first")
        self._transfer_ready = False

    def start(self) -> None:
        """Begin an update: the parameters are gone."""
        if self._updating:
            raise ValueError("a weight update is already running")
        self._updating = True
        self.meta = True
        self._received = []

    def update(self, info: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Receive some parameters: one `info` for all ranks, or one for each."""
        if not self._updating:
            raise ValueError("no weight update is running: start one first")
        self._updating = False  # until the step has succeeded: a failure ends the update
        if not self._transfer_ready:
            raise ValueError("the weight transfer engine is not initialized")
        infos = [info] if isinstance(info, Mapping) else info[: self._world_size]
        if not isinstance(info, Mapping) and len(infos) < self._world_size:
            raise ValueError(f"update_info: {len(infos)} objects for {self._world_size} ranks")
        for one in infos:
            transfer.check_update(self.backend, one)
        self._updating = True
        self._received.append(json.dumps(list(infos), sort_keys=True).encode())

    def finish(self, version: str | None) -> None:
        """End the update: the parameters are whole again, under a new identity if any were sent."""
        if not self._updating:
            raise ValueError("no weight update is running: start one first")
        self._updating = False
        self.meta = False
        if self._received:
            self.identity = _hash(self.identity if version is None else b"version " + version.encode(), *self._received)
        if version is not None:
            self.version = version

    def reload(self, path: str | None) -> None:
        """Load a checkpoint, or with None the one that the worker started with. The version is not touched."""
        self.identity = _hash(b"initial") if path is None else _hash(b"path", path.encode())
        self.meta = False

    def lose(self) -> None:
        """Drop the parameters without a word (sleep level 2): until the next update, what comes out is garbage."""
        self.identity = _hash(b"garbage")


def _hash(*parts: bytes) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
