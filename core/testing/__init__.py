"""What the tests of a plugin need; for pytest with pytest-trio.

* `make_call` and `make_worker`: what hooks are passed, to call a hook by hand.
* `in_memory`: a whole headrace around your plugin, in front of workers that answer at once and note what they were asked, by rank.
* `on_stand_ins`: the same in front of stand-in processes, over real gRPC and HTTP.
* `core.testing.fixtures`: both as pytest fixtures.
"""

from core.testing.objects import make_call, make_worker
from core.testing.recording import RecordingLane, recording_worker
from core.testing.running import RunningHeadrace, in_memory, on_stand_ins

__all__ = ["RecordingLane", "RunningHeadrace", "in_memory", "make_call", "make_worker", "on_stand_ins", "recording_worker"]
