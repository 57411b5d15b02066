"""What headrace has done to one worker, as far as it decides what may be done next."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import trio

from core.fleet.trainer_updates import TrainerUpdate

Part = Literal["model", "draft"]


class Snapshot(NamedTuple):
    """What an update that has begun changes, see `Standing`."""

    updating: bool
    received: bool
    session: bool
    draft: bool
    torn: frozenset[Part]
    opened: TrainerUpdate | None


class Standing:
    """One worker's. All of it is of one process: another one at the same address starts anew."""

    def __init__(self, instance: str) -> None:
        self.instance = instance
        #: Who has paused it: the trainer, who resumes it, or an update that found it running and resumes it by itself.
        self.paused: Literal["", "trainer", "update"] = ""
        #: A headrace before this one has paused it for an update, and nobody else will resume it.
        self.left_frozen = False
        #: It came, or was whole again, while the others were paused, and goes on when they do; its engine may run.
        self.waits = False
        self.asleep = False
        #: It was there, paused or asleep, before this headrace was, and nobody can tell which.
        self.unclear = False
        #: It was there before this headrace was. When it is found paused then, whoever has paused it may be no more.
        self.inherited = False
        #: It was found paused then, and no journal tells what was done to it before: its weights may be half of an update.
        self.unknown = False
        #: An update was started and not finished. vLLM 0.33: a forward pass now kills the engine.
        self.updating = False
        #: That update is of the draft model's weights alone.
        self.draft = False
        #: Since the start, weights have arrived.
        self.received = False
        #: The start of that update, when a trainer takes its steps.
        self.opened: TrainerUpdate | None = None
        #: The engine may think that an update is running, whatever has become of it; it then refuses to start another.
        self.session = False
        #: Why it is quarantined: it failed an update, or somebody has said so. A complete update ends that.
        self.failed = ""
        #: It is quarantined because it has missed an update, so another one of the same weights helps.
        self.late = False
        #: Why somebody has taken it out, until it is released: no update ends that.
        self.by_hand = ""
        #: The number of the weights that it has, see `Weights`; 0 for those that it has started with.
        self.weights = 0
        #: Which weights have to be replaced completely before it may run again.
        self.spoiled: set[Part] = set()
        #: The model's weights are among those because a sleep has thrown them away, and nothing has replaced them since.
        self.discarded = False
        #: Of which weights a replacement began in this process that has not ended well. vLLM 0.31: what it has left in an incomplete layer
        #: is taken for a part of the next one, unless it is cleared away before.
        self.torn: set[Part] = set()
        #: Who has asked for that, and why; empty when nobody has.
        self.draining = ""
        #: What blocks its engine just now.
        self.blocked_by = ""
        #: When somebody last asked for something, and since when it is there, on trio's clock.
        self.touched = self.since = trio.current_time()

    @property
    def is_whole(self) -> bool:
        """Whether its weights are known to be complete, so that its engine may run."""
        return not (self.updating or self.spoiled or self.unknown)

    @property
    def is_frozen(self) -> bool:
        """Whether nobody but headrace will resume its engine, and nothing is against that."""
        return (self.paused == "update" or self.left_frozen) and self.is_whole and not (self.asleep or self.waits)

    @property
    def part(self) -> Part:
        """What the update that is running replaces."""
        return "draft" if self.draft else "model"

    def snapshot(self) -> Snapshot:
        """For `Standings.take_back`."""
        return Snapshot(self.updating, self.received, self.session, self.draft, frozenset(self.torn), self.opened)

    def note(self) -> dict[str, Any]:
        """What the journal keeps of it, for `recall`."""
        return {
            "state": "updating" if self.updating else "quarantined" if self.failed else "whole",
            "reason": self.failed,
            "instance": self.instance,
            "session": self.session,
            "weights": self.weights,
            "late": self.late,
            "by_hand": self.by_hand,
            "draining": self.draining,
            "torn": sorted(self.torn),
            "asleep": self.asleep,
            "discarded": self.discarded and not self.updating,
        }

    def recall(self, noted: Mapping[str, Any]) -> None:
        """A headrace before this one has noted that of this process. Older ones have noted less."""
        self.weights, self.late, self.asleep = noted.get("weights", 0), noted.get("late", False), noted.get("asleep", False)
        self.by_hand, self.draining = noted.get("by_hand", ""), noted.get("draining", "")
        self.session = noted.get("session", noted["state"] != "whole")
        unknown: list[Part] = [] if noted["state"] == "whole" else ["model"]
        self.torn = set(noted.get("torn", unknown))
        if noted["state"] == "quarantined":
            self.failed = noted["reason"]
        elif noted["state"] == "updating":
            self.failed, self.late = "headrace ended in the middle of a weight update", True
        self.discarded = noted.get("discarded", False)
        self.spoiled = {"model"} if self.failed or self.discarded else set()
        self.unknown = False
