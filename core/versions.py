"""Which policy versions produced an output, for wires that don't tell: vLLM's gRPC.

The versions are those that headrace knows. When a worker's label changes while its engine is paused, as in any update through headrace, a
stream says to the token which version each one is of. What nobody can know is null: the split of a unary reply, or of a stream whose
client was behind when the label changed, or a change that a probe has found.
"""

from collections.abc import Sequence

from core.fleet.worker import Worker
from core.reply import Output, WeightVersion


class UnaryVersions:
    """For the outputs of one attempt that come whole. It is made before they are asked for."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._changes = worker.version_changes

    def tell(self, outputs: Sequence[Output]) -> None:
        """Write the spans into the outputs, or leave null what may be of several versions."""
        version = self._worker.policy_version
        if version is None or self._worker.version_changes != self._changes:
            return
        for output in outputs:
            output.choice.weight_versions = _spans([(version, 0)], len(output.choice.token_ids))


class StreamedVersions:
    """For the outputs of one attempt that come in pieces. The last piece of each says it of the whole, as vLLM's HTTP servers do."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._changes = worker.version_changes
        self._finds = worker.version_finds
        #: How many tokens each output has so far.
        self._tokens: dict[int, int] = {}
        #: The versions so far, each with where it starts in every output.
        self._starts: list[tuple[str | None, dict[int, int]]] = [(worker.policy_version, {})]
        self._is_known = True

    def wait(self) -> None:
        """Somebody is going to wait for what comes next. A change that has happened before was while messages may have piled up unread."""
        if self._worker.version_changes != self._changes:
            self._is_known = False
            self._changes = self._worker.version_changes

    def tell(self, outputs: Sequence[Output]) -> None:
        """These have come; write the spans into those that are last."""
        worker, tokens = self._worker, self._tokens
        if worker.version_changes != self._changes:
            self._changes = worker.version_changes
            self._starts.append((worker.policy_version, dict(tokens)))
        for output in outputs:
            choice = output.choice
            count = tokens[choice.index] = tokens.get(choice.index, 0) + len(choice.token_ids)
            if choice.finish_reason is not None and self._is_known and worker.version_finds == self._finds:
                starts = [(version, start.get(choice.index, 0)) for version, start in self._starts]
                choice.weight_versions = _spans(starts, count)


def _spans(starts: Sequence[tuple[str | None, int]], end: int) -> list[WeightVersion] | None:
    """Contiguous spans over so many tokens; `None` when one of the versions isn't known."""
    spans: list[WeightVersion] = []
    ends = [start for _, start in starts[1:]] + [end]
    for (version, start), stop in zip(starts, ends, strict=True):
        if version is None:
            return None
        if start == stop:
            continue
        if spans and spans[-1].version == version:
            spans[-1].end = stop
        else:
            spans.append(WeightVersion(version, start, stop))
    return spans
