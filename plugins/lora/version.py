"""The versions of adapters: which is current, who holds it, and whether calls still use it."""

from msgspec import Struct, field

from core import Worker
from plugins.lora.names import name_on_workers, split_name
from plugins.lora.source import Source


class Version(Struct, kw_only=True, eq=False):
    """One version of an adapter. Its weights never change."""

    #: What clients call the adapter, and what workers call this version of it.
    name: str
    on_workers: str
    #: The model that it belongs to, by a name that its workers serve.
    base: str
    source: Source
    #: Unix time, in seconds.
    created: int
    #: Workers that said that they have loaded it: calls go there.
    holders: set[Worker] = field(default_factory=set[Worker])
    #: Workers that may have loaded it: there it's unloaded.
    asked: set[Worker] = field(default_factory=set[Worker])
    #: Calls that use it now.
    calls: int = 0
    #: No new call uses it; it goes once the last one has settled.
    retired: bool = False

    @property
    def is_alias(self) -> bool:
        """Whether it stands in for the model itself: calls that name the model get it."""
        return self.name == self.base


class Versions:
    """All versions that some worker may hold. No waiting here: what changes is changed at once."""

    def __init__(self) -> None:
        #: By the name that clients use.
        self.current: dict[str, Version] = {}
        #: By the name on the workers; those that are being loaded and the retired ones too.
        self.all: dict[str, Version] = {}
        self._next: dict[str, int] = {}

    def new(self, name: str, base: str, source: Source, *, created: int, first: int) -> Version:
        """A version that is nobody's yet. Numbers go up from `first` and are never used twice: a worker's cache may remember them."""
        number = max(self._next.get(name, 0), first)
        return self._add(name, number, base, source, created)

    def adopt(self, on_workers: str, path: str, worker: Worker) -> Version | None:
        """A version that a worker held before this process knew it becomes current; `None` when another one is, or a later one was."""
        name, number = split_name(on_workers)
        if name in self.current or number < self._next.get(name, 0):
            return None
        base = name if name in worker.models else worker.models[0]
        version = self._add(name, number, base, Source(path), int(worker.introduced_at))
        self.make_current(version)
        return version

    def make_current(self, version: Version) -> None:
        """From now on calls get this version; the one before it is retired."""
        if before := self.current.get(version.name):
            before.retired = True
        self.current[version.name] = version

    def retire(self, version: Version) -> None:
        """No new call gets it."""
        version.retired = True
        if self.current.get(version.name) is version:
            del self.current[version.name]

    def forget_unheld(self) -> None:
        """Drop the retired versions that no worker can hold any more."""
        for on_workers, version in list(self.all.items()):
            if version.retired and not version.asked and not version.calls:
                del self.all[on_workers]

    def forget_worker(self, worker: Worker) -> None:
        """The worker holds nothing."""
        for version in self.all.values():
            version.holders.discard(worker)
            version.asked.discard(worker)

    def _add(self, name: str, number: int, base: str, source: Source, created: int) -> Version:
        self._next[name] = number + 1
        on_workers = name_on_workers(name, number)
        version = Version(name=name, on_workers=on_workers, base=base, source=source, created=created)
        self.all[on_workers] = version
        return version
