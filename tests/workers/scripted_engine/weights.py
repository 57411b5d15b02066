"""The weights of a scripted engine: a label, a fingerprint that the outputs depend on, and vLLM's rules for changing them."""

import hashlib
import json
from typing import Any


class Weights:
    """What a worker process does to its model when `collective_rpc` says so.

    `broken` is true from the start of an update until one was finished: the parameters are placeholders then, and one forward
    pass kills the engine.
    """

    def __init__(self) -> None:
        self.version = "default"
        self.fingerprint = "initial"
        self.broken = False
        self._connected = False
        self._received: list[Any] | None = None

    def init_weight_transfer_engine(self, init_info: Any) -> None:
        """Join the trainer's group. Nobody is waited for."""
        self._connected = True

    def shutdown_weight_transfer_engine(self) -> None:
        """Leave the trainer's group."""
        if self._received is not None:
            raise RuntimeError("a weight update is in progress")
        self._connected = False

    def start_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """Replace the parameters by placeholders."""
        if self._received is not None:
            raise RuntimeError("a weight update has been started already; finish it first")
        self._received = []
        self.broken = True

    def update_weights(self, update_info: Any) -> None:
        """Take a part of the new weights."""
        if self._received is None:
            raise RuntimeError("update_weights needs a start_weight_update first")
        if not self._connected:
            self._received = None
            raise RuntimeError("update_weights needs an init_weight_transfer_engine first")
        self._received.append(update_info)

    def fail_update(self) -> None:
        """What a failed `update_weights` leaves behind: no update in progress, and a broken model."""
        self._received = None

    def finish_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """Put the received parameters to use."""
        if self._received is None:
            raise RuntimeError("finish_weight_update needs a start_weight_update first")
        received, self._received = self._received, None
        if received:
            self._replace(received)

    def reload_weights(self, weights_path: str | None = None, **kwargs: Any) -> None:
        """Load a checkpoint from disk; `None` is the one that the engine was started with."""
        if weights_path is None:
            self.fingerprint, self.broken = "initial", False
        else:
            self._replace(weights_path)

    def compute_weight_checksums(self) -> dict[str, str]:
        """One checksum for the whole model."""
        return {"model": self.fingerprint}

    def extension_method(self, *args: Any, **kwargs: Any) -> None:
        """Stand for a method of a worker extension that replaces all weights."""
        self._replace([args, kwargs])

    def _replace(self, source: Any) -> None:
        text = json.dumps(source, sort_keys=True, default=repr)
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self.broken = False
