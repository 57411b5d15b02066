"""What headrace has done to one worker, as far as it decides what may be done next."""

from typing import Literal

import trio

from core.fleet.opened import Opened


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
        #: It was there before this headrace was. When it is found paused then, whoever has paused it may be no more.
        self.inherited = False
        #: An update was started and not finished. vLLM 0.33: a forward pass now kills the engine.
        self.updating = False
        #: That update is of the draft model's weights alone.
        self.draft = False
        #: Since the start, weights have arrived.
        self.received = False
        #: The start of that update, when a trainer takes its steps.
        self.opened: Opened | None = None
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
        self.spoiled: set[Literal["model", "draft"]] = set()
        #: Who has asked for that, and why; empty when nobody has.
        self.draining = ""
        #: What blocks its engine just now.
        self.blocked_by = ""
        #: When somebody last asked for something, and since when it is there, on trio's clock.
        self.touched = self.since = trio.current_time()

    @property
    def is_frozen(self) -> bool:
        """Whether nobody but headrace will resume its engine, and nothing is against that."""
        ours = self.paused == "update" or self.left_frozen
        return ours and not (self.updating or self.spoiled or self.asleep or self.waits)
