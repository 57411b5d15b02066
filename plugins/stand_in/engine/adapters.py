"""LoRA adapters by name: what is loaded, and which paths may be."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from plugins.stand_in.engine.refusal import Problem, Refused, invalid

ALLOWED_PREFIXES = "VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES"


@dataclass(frozen=True)
class Adapter:
    """One loaded adapter. Its weights are what its path says: the same path gives the same tokens under any name."""

    id: int
    name: str
    path: str

    @property
    def weights(self) -> bytes:
        """Stands for the adapter's weights in the pseudo-model."""
        return blake2b(self.path.encode(), digest_size=16).digest()

    @property
    def namespace(self) -> bytes:
        """What keeps its KV blocks apart: name and path, as in vLLM's block hashes."""
        return f"{self.name}\0{self.path}".encode()


class Adapters:
    """The adapters of one server process. `reserved` are the names of the base model.

    `environment` is where the allowed path prefixes are read, at every load, as vLLM 0.33 does.
    """

    def __init__(self, *, enabled: bool, reserved: tuple[str, ...], environment: Mapping[str, str] = os.environ) -> None:
        self.enabled = enabled
        self._reserved = reserved
        self._environment = environment
        self._by_name: dict[str, Adapter] = {}
        self._next_id = 1

    def get(self, name: str) -> Adapter:
        """The adapter called `name`. Refused: PRECONDITION when LoRA is off, NOT_FOUND when it isn't loaded."""
        self._demand_enabled()
        if name not in self._by_name:
            raise Refused(Problem.NOT_FOUND, f"LoRA adapter `{name}` is not loaded")
        return self._by_name[name]

    def find(self, name: str) -> Adapter | None:
        """The adapter called `name`, if there is one."""
        return self._by_name.get(name)

    def list(self) -> list[Adapter]:
        """All of them, by name. Refused: PRECONDITION when LoRA is off."""
        self._demand_enabled()
        return [self._by_name[name] for name in sorted(self._by_name)]

    def load(self, name: str, path: str, *, in_place: bool = False) -> Adapter:
        """Load an adapter; with `in_place` one of that name is replaced and keeps its id.

        Refused, in this order: PRECONDITION (LoRA is off), INVALID (a local path that is not allowed, blank name or path),
        ALREADY_EXISTS (the name is the base model's, or taken), INTERNAL (a local path without an adapter).
        """
        self._demand_enabled()
        self._check_path(path)
        for field, value in (("lora_name", name), ("lora_path", path)):
            if not value.strip():
                raise invalid(f"{field} must not be empty")
        old = self._by_name.get(name)
        if name in self._reserved:
            raise _taken(f"LoRA adapter `{name}` conflicts with a served base model")
        if old is not None and not in_place:
            raise _taken(f"LoRA adapter `{name}` is already loaded")
        adapter = Adapter(self._take_id() if old is None else old.id, name, path)
        if Path(path).is_absolute() and not Path(path, "adapter_config.json").exists():
            # The engine finds that out, so the id is used up, as in vLLM.
            raise Refused(Problem.INTERNAL, f"failed to load LoRA adapter `{name}`: there is no adapter in {path}")
        self._by_name[name] = adapter
        return adapter

    def unload(self, name: str) -> Adapter:
        """Forget an adapter and return it. Refused: INVALID for a blank name, otherwise as `get`."""
        self._demand_enabled()
        if not name.strip():
            raise invalid("lora_name is required", param="lora_name")
        adapter = self.get(name)
        del self._by_name[name]
        return adapter

    def _demand_enabled(self) -> None:
        if not self.enabled:
            raise Refused(Problem.PRECONDITION, "LoRA is not enabled: start the worker with --enable-lora")

    def _take_id(self) -> int:
        taken, self._next_id = self._next_id, self._next_id + 1
        return taken

    def _check_path(self, path: str) -> None:
        # What looks like a path, or is one, counts as local; anything else is a name on a hub.
        if not (path.startswith(("/", ".", "~")) or Path(path).exists()):
            return
        prefixes = [prefix for prefix in self._environment.get(ALLOWED_PREFIXES, "").split(os.pathsep) if prefix]
        if not prefixes:
            raise invalid(f"local LoRA paths are refused unless {ALLOWED_PREFIXES} is set", param="lora_path")
        if not Path(path).is_absolute():
            raise invalid(f"a local LoRA path must be absolute, and under a prefix of {ALLOWED_PREFIXES}", param="lora_path")
        if not Path(path).exists():
            raise invalid("the local LoRA path must exist and be readable", param="lora_path")
        if not any(Path(path).resolve().is_relative_to(_canonical(prefix)) for prefix in prefixes):
            raise invalid(f"the local LoRA path is outside the prefixes of {ALLOWED_PREFIXES}", param="lora_path")


def _canonical(prefix: str) -> Path:
    if not Path(prefix).is_absolute():
        raise Refused(Problem.INTERNAL, f"{ALLOWED_PREFIXES} has a prefix that is not absolute")
    return Path(prefix).resolve()


def _taken(message: str) -> Refused:
    return Refused(Problem.ALREADY_EXISTS, message, param="lora_name")
