"""Which workers are behind: on an older policy version than the newest of their model, by more than is allowed."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from core.fleet.worker import Worker

#: Digits of a version that is a number; a longer one is a name.
_DIGITS: Final = 18


def behind(workers: Iterable[Worker], allowed: int) -> Mapping[Worker, str]:
    """Those of the workers of one model that are behind, each with why, in words.

    Versions that are whole numbers are compared by how far they are apart, and all other ones are behind these. When none is a number,
    whatever differs from the newest is behind: that is the latest that was given to a worker through headrace, and without any the one
    that most have. A worker that tells no version is behind when others tell one.

    Whoever is there counts, also who takes no calls any more: who asks for the newest weights had rather hear an error than older tokens.
    Only a worker that is held out because it has other weights than the fleet should have is no measure; nor is one that is gone, for its
    weights have gone with it.
    """
    counted = [worker for worker in workers if worker.is_there and not (worker.hold and worker.hold.late)]
    versions = {worker: worker.policy_version for worker in counted}
    if len(set(versions.values())) <= 1:
        return {}
    numbers = {worker: int(version) for worker, version in versions.items() if version and _is_number(version)}
    if numbers:
        newest = max(numbers.values())
        late = [worker for worker in counted if worker not in numbers or newest - numbers[worker] > allowed]
        return {worker: f"is behind: it has version {versions[worker]}, and {newest} is there" for worker in late}
    newest = _newest(counted)
    late = [worker for worker in counted if versions[worker] != newest]
    return {worker: f"is behind: it has version {versions[worker]!r}, and {newest!r} is there" for worker in late}


def _newest(workers: Iterable[Worker]) -> str | None:
    telling = [worker for worker in workers if worker.policy_version is not None]
    latest = max(telling, key=lambda worker: worker.labelled_at)
    if latest.labelled_at:
        return latest.policy_version
    return Counter(worker.policy_version for worker in telling).most_common(1)[0][0]


def _is_number(version: str) -> bool:
    return version.isascii() and version.isdecimal() and len(version) <= _DIGITS
