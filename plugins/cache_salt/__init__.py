"""Cache salt: one namespace for KV blocks per policy version, wherever the client wrote it.

Clients write the salt in five places; engines read it in one. This plugin finds it, holds it to vLLM's rules, and makes it the call's
own, so that neither an engine's prefix cache nor our routing ever mixes two policy versions.
"""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec.structs import replace

from core import BadRequest, Call, NoWorker, PluginSettings, Worker, hookimpl
from plugins.cache_salt.places import HEADER, may_hold_salts, take_salts
from plugins.cache_salt.rule import check_salt, salt_of_version


class Settings(PluginSettings, frozen=True):
    """`[plugins.cache-salt]`."""

    #: Refuse calls without a salt (400).
    require: bool = False
    #: The salt of a call that has none: `none`, or the `weight-version` of the worker that it goes to. Then a worker that doesn't tell
    #: its policy version gets no such call.
    default: Literal["none", "weight-version"] = "none"

    def __post_init__(self) -> None:
        if self.require and self.default != "none":
            raise ValueError("require refuses the calls that default is for; set one of them")


class CacheSalt:
    """Makes `call.cache_salt` what the client meant by it; the core makes that the call's namespace and the engine's salt."""

    settings_type = Settings

    def __init__(self, settings: Settings) -> None:
        self._require = settings.require
        self._by_version = settings.default == "weight-version"

    @hookimpl
    def receive_call(self, call: Call) -> None:
        """See `core.hookspecs`."""
        if may_hold_salts(call):
            call.cache_salt = _one_of(take_salts(call))
        if self._require and not call.cache_salt and call.touches_kv:
            raise BadRequest(
                f"cache_salt: a salt is required here; send the policy version as cache_salt, or in the header {HEADER}",
                param="cache_salt",
            )

    @hookimpl
    def identify_call(self, call: Call) -> None:
        """See `core.hookspecs`."""
        if self._wants_version(call):
            call.identity = replace(call.identity, per_worker=_version_salt)

    @hookimpl
    def eligible_workers(self, call: Call, workers: Sequence[Worker]) -> Sequence[Worker] | None:
        """See `core.hookspecs`."""
        if not self._wants_version(call):
            return None
        telling = [worker for worker in workers if worker.policy_version]
        if not telling:
            raise NoWorker("no worker tells its policy version, which is the salt of a call that has none; send a cache_salt")
        return telling

    def _wants_version(self, call: Call) -> bool:
        return self._by_version and not call.cache_salt and call.touches_kv


def _version_salt(worker: Worker) -> str:
    """The salt of a call that has none, on this worker. Raises: `NoWorker`."""
    if not worker.policy_version:  # it was eligible with one
        raise NoWorker(f"worker {worker.id} doesn't tell its policy version, which is the salt of a call that has none")
    return salt_of_version(worker.policy_version)


def _one_of(found: Sequence[tuple[str, str, Any]]) -> str:
    """The salt that all places agree on, empty for none; each is its name in prose, the field's path, and what stands there.

    Raises: `BadRequest`.
    """
    salt = first = ""
    for place, path, value in found:
        checked = check_salt(value, path)
        if not salt:
            salt, first = checked, place
        elif checked != salt:
            raise BadRequest(f"cache_salt: {first} says {salt!r} and {place} says {checked!r}; send one", param=path)
    return salt
