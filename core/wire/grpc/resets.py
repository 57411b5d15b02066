"""How fast calls may be cancelled on one connection.

A server that is asked to reset streams which it has not yet accepted may see an attack (CVE-2023-44487). The h2 crate,
which vLLM's server stands on, counts such streams and closes the connection, with every other call on it, at 20. So:

* a stream counts as accepted once the server sent anything on it or on a later one (streams are accepted in order), or
  answered a PING that left after it;
* resets of accepted streams go out at once, and so do the first `BURST` others;
* further ones wait for the answer to a PING, one round trip. Meanwhile the connection is `strained`, and new calls had
  better go to another.
"""

BURST = 10
"""Half of what the h2 crate takes."""

BARRIER = b"accepted"
"""The eight bytes of the PING that asks how far the server has come."""


class ResetBudget:
    """Says for each stream to be reset: now, or after the next answered PING."""

    def __init__(self) -> None:
        self._accepted = 0
        self._early: list[int] = []  # resets sent before their streams were known to be accepted
        self._waiting: list[int] = []
        self._asked: int | None = None  # the highest stream that the PING under way vouches for

    @property
    def strained(self) -> bool:
        """Whether resets are waiting."""
        return bool(self._waiting)

    def accepted(self, stream_id: int) -> None:
        """The server sent something on this stream."""
        if stream_id > self._accepted:
            self._accepted = stream_id

    def take(self, stream_id: int) -> bool:
        """Whether this stream may be reset at once; if not, the budget keeps it and gives it back from `answered`."""
        if stream_id <= self._accepted:
            return True
        if not self._waiting:
            if len(self._early) >= BURST:
                self._early = [early for early in self._early if early > self._accepted]
            if len(self._early) < BURST:
                self._early.append(stream_id)
                return True
        self._waiting.append(stream_id)
        return False

    def ask(self, highest: int) -> bool:
        """Whether a PING with `BARRIER` has to go out now, behind the frames of all streams up to `highest`."""
        if not self._waiting or self._asked is not None:
            return False
        self._asked = highest
        return True

    def answered(self) -> list[int]:
        """The PING came back: the streams to reset now. More may wait: `ask` again."""
        if self._asked is not None:
            self.accepted(self._asked)
            self._asked = None
        waiting, self._waiting = self._waiting, []
        return [stream_id for stream_id in waiting if self.take(stream_id)]
