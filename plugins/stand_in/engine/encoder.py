"""Looking at media, without looking: who has seen what, and how encode workers tell the others.

As with vLLM's `ECExampleConnector`, what was seen lies in a folder that the workers share. Here it is an empty file for each of the media.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from plugins.stand_in.engine.call import Medium


class SharedStorage(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`ec_connector_extra_config`."""

    shared_storage_path: str = "/tmp"  # noqa: S108 - vLLM's default


class ECTransferConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """vLLM's `--ec-transfer-config`."""

    ec_connector: Literal["ECExampleConnector"]
    ec_role: Literal["ec_producer", "ec_consumer", "ec_both"]
    ec_connector_extra_config: SharedStorage = SharedStorage()


class Encoder:
    """What looks at media; `looks` counts how often. Without a configuration nobody is told, and nobody asked."""

    def __init__(self, config: ECTransferConfig | None) -> None:
        role = config.ec_role if config else ""
        self.looks = 0
        #: It makes no token, and has no KV cache, as vLLM's producers that are no consumers.
        self.is_all = role == "ec_producer"
        self._produces = role in {"ec_producer", "ec_both"}
        self._folder = Path(config.ec_connector_extra_config.shared_storage_path) if config else None

    def see(self, media: Sequence[Medium]) -> None:
        """Look at what nobody has seen yet. Raises: `OSError` when the folder can't be written to."""
        for medium in media:
            # A client has chosen the identifier: it must not become a path.
            seen = self._folder / blake2b(medium.identifier.encode(), digest_size=16).hexdigest() if self._folder else None
            if seen and seen.exists():
                continue
            self.looks += 1
            if seen and self._produces:
                seen.touch()

    def hand_over(self, media: Sequence[Medium]) -> Mapping[str, Any] | None:
        """The `ec_transfer_params` that a producer returns for the worker that goes on."""
        if not (self._produces and media):
            return None
        items: dict[str, dict[str, Any]] = {}
        for index, medium in enumerate(media):
            items.setdefault(medium.identifier, {"item_indices": [], "metadata": {}})["item_indices"].append(index)
        return items
