"""KV-aware placement: a call goes where its prompt is cached already, unless too much is to be done there.

Engines tell over ZeroMQ which blocks they store and drop; an index of ours keeps it for all workers, by tokens, salt, adapter and media.
For what they don't tell, or not yet, it goes by what was sent where.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Final

import structlog
import trio
from msgspec import Meta, Struct, field
from prometheus_client import CollectorRegistry

from core import Call, Choice, PluginSettings, Proxy, Worker, hookimpl
from plugins.routing_kv.followers import Followers
from plugins.routing_kv.metrics import Hits, IndexCollector
from plugins.routing_kv.places import Caches, Place, Places
from plugins.routing_kv.scoring import Match, Scorer, Weights
from plugins.routing_kv.sources import SourceSettings

log = structlog.stdlib.get_logger()

_NAME: Final = "kv"
#: How much each output changes what the next one is expected to have: the last fifty count.
_LEARNING: Final = 0.02
Share = Annotated[float, Meta(ge=0, le=1)]


class Settings(PluginSettings, frozen=True):
    """`[plugins.kv]`."""

    #: What a token that a place has to compute for others costs, where one of the call's own costs 1. More of it balances better, less of
    #: it finds more cached.
    load_weight: Annotated[float, Meta(ge=0)] = 0.3
    #: How long it takes, in seconds, until half of what a place has computed lately no longer counts as its load. Between two turns a
    #: session weighs on nobody, and comes back all the same.
    recent_seconds: Annotated[float, Meta(gt=0)] = 30.0
    #: So many output tokens are expected of a call at first, then the mean of the last ones; fewer if its max_tokens says so.
    output_tokens: Annotated[int, Meta(ge=0)] = 512
    #: What a cached token is worth that lies in the worker's CPU memory, or in storage; in the GPU's memory it is 1.
    cpu_weight: Share = 0.75
    storage_weight: Share = 0.25
    #: For how long, in seconds, a worker without events is believed to have what was sent there; up to twice as long.
    believe_seconds: Annotated[float, Meta(gt=0)] = 120.0
    #: At most so many blocks are in the index, counted once for each worker that has them; what comes on top is not. Of what was sent, at
    #: most an eighth of that is remembered.
    max_blocks: Annotated[int, Meta(ge=1)] = 8_000_000
    #: Tokens in a block of a worker that doesn't say it: one without gRPC and without events.
    block_size: Annotated[int, Meta(ge=1)] = 16
    #: Where the events of a worker (its id) come from, when it doesn't tell or is reached by another address.
    sources: dict[str, SourceSettings] = field(default_factory=dict[str, SourceSettings])


class _Attempt(Struct, frozen=True):
    """A call on its worker. It keeps `choice` alive, by whose identity it's found."""

    choice: Choice
    place: Place
    #: Tokens of the prompt that had to be computed, and of the output that were expected.
    prompt: int
    output: int


class KV:
    """The policy."""

    settings_type = Settings

    def __init__(self, settings: Settings, clock: Callable[[], float] = trio.current_time) -> None:
        self._settings = settings
        self._caches = Caches(most=settings.max_blocks, believe_seconds=settings.believe_seconds, clock=clock)
        self._places = Places(self._caches, block_size=settings.block_size, recent_seconds=settings.recent_seconds, clock=clock)
        self._scorer = Scorer(self._caches, Weights(settings.load_weight, settings.cpu_weight, settings.storage_weight))
        self._followers = Followers(self._places, self._caches.index, settings.sources)
        self._hits = Hits()
        self._attempts: dict[int, _Attempt] = {}
        self._turn = 0
        #: What an output is expected to have, in tokens.
        self._output = float(settings.output_tokens)
        #: The last choice, which `attempt_started` needn't work out again.
        self._last: tuple[Call, Match] | None = None

    @hookimpl
    def choose_worker(self, call: Call, workers: Sequence[Worker]) -> Choice:
        """See `core.hookspecs`."""
        self._followers.need()
        self._places.cool()
        places = self._open_to(call, workers)
        turn = self._turn % len(places)
        match = self._scorer.best(call, places[turn:] + places[:turn])
        self._last = call, match
        return Choice(match.place.worker, _reason(match), match.place.rank, len(call.token_ids) - int(match.tokens))

    @hookimpl
    def attempt_started(self, call: Call, choice: Choice) -> None:
        """See `core.hookspecs`."""
        match = self._match(call, choice)
        place, prompt = match.place, match.prompt
        sampling = call.sampling
        output = min(sampling.max_tokens or self._output, self._output) * (sampling.n or 1)
        attempt = self._attempts[id(choice)] = _Attempt(choice, place, int(match.tokens), int(output))
        place.begin_call(attempt.prompt + attempt.output)
        self._turn += 1
        self._hits.prompt_tokens += len(call.token_ids)
        self._hits.expected_tokens += len(call.token_ids) - int(match.tokens)
        # What an engine tells from its beginning needs to be guessed only until it does; but nobody can tell where it puts media.
        if place.feed.whole and prompt.known:
            self._caches.soon.note(prompt.reach(prompt.length), place.soon_bit)
        else:
            self._caches.believed.note(prompt.reach(prompt.length), place.believed_bit)

    @hookimpl
    def attempt_ended(self, call: Call, choice: Choice, output_tokens: int) -> None:
        """See `core.hookspecs`."""
        if output_tokens:
            self._output += _LEARNING * (output_tokens / (call.sampling.n or 1) - self._output)
        if attempt := self._attempts.pop(id(choice), None):
            attempt.place.end_call(attempt.prompt + attempt.output, attempt.prompt + output_tokens)

    @hookimpl
    def run_service(self, proxy: Proxy) -> Callable[[], Awaitable[None]]:
        """See `core.hookspecs`."""
        workers = [worker.name for worker in proxy.settings.workers]
        for name in self._settings.sources if workers else ():
            if name not in workers:
                log.warning("kv.source_of_nobody", worker=name, reason=f"no worker has this id; there are {', '.join(workers)}")
        routing = proxy.settings.routing
        if _NAME in routing.policies or any(_NAME in rule.policies for rule in routing.rules):
            self._followers.need()
        return self._followers.run

    @hookimpl
    def worker_joined(self, worker: Worker) -> None:
        """See `core.hookspecs`."""
        self._followers.join(worker)

    @hookimpl
    def worker_left(self, worker: Worker) -> None:
        """See `core.hookspecs`."""
        self._followers.leave(worker)

    @hookimpl
    def collect_metrics(self, registry: CollectorRegistry) -> None:
        """See `core.hookspecs`."""
        registry.register(IndexCollector(self._places, self._caches, self._followers, self._hits))

    def _open_to(self, call: Call, workers: Sequence[Worker]) -> list[Place]:
        """Every place that the call may go to."""
        places: list[Place] = []
        wanted = call.data_parallel_rank
        for worker in workers:
            own = self._places.of(worker)
            places += own if wanted is None or len(own) == 1 else (self._places.at(worker, wanted),)
        if self._caches.believed.tables():
            for place in places:
                place.renew()
        return places

    def _match(self, call: Call, choice: Choice) -> Match:
        """What is known of a choice, whoever has made it."""
        last, self._last = self._last, None
        place = self._places.at(choice.worker, choice.rank)
        if last and last[0] is call and last[1].place is place:
            return last[1]
        return self._scorer.best(call, [place])


def _reason(match: Match) -> str:
    if not match.prompt.length:
        return "kv: least loaded"
    reason = f"kv: {match.blocks} of {match.prompt.length} blocks"
    return f"{reason}, guessed" if match.guessed else reason
