"""A trace, replayed on a fleet of simulated workers under the policies that the settings choose."""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import shake_128

import trio
from msgspec import Struct
from trio.testing import MockClock

from core.call import Call, SamplingParams
from core.errors import CallError
from core.fleet.fleet import Fleet
from core.fleet.worker import Worker, WorkerInfo
from core.loading import load_plugins
from core.metrics import Metrics
from core.path import Path
from core.placement import Placer
from core.registry import Registry
from core.routing import Routing
from core.settings import Settings, WorkerSettings
from core.simulation.engine import NOTE, EngineModel, SimulatedEngine, Timing
from core.simulation.trace import Turn, sessions

_MODEL = "simulated"
#: Seconds between the starts of two sessions that start at once: trio runs what is due at one moment in any order, the trace has one.
_STAGGER = 1e-9


class Replay(Struct, frozen=True):
    """What came of a trace: a timing for each turn that was answered, in the order of their ends."""

    turns: list[tuple[Turn, Timing]]
    #: Calls that were refused or failed, by their error's text.
    failures: Mapping[str, int]
    #: Tokens that each worker has computed; `None` of them came from a cache.
    computed_tokens: Mapping[str, int]


def replay(turns: Iterable[Turn], settings: Settings, *, workers: int, model: EngineModel) -> Replay:
    """Replay a trace under the policies of the settings; takes seconds, whatever the trace's own time.

    No other plugin is loaded, and no service runs: nothing here has a network. Blocks until the end.

    Raises: `SettingsError`.
    """
    registry = load_plugins(settings, only=settings.routing.named)
    return trio.run(_Replaying(list(sessions(turns)), registry, settings, workers, model).run, clock=MockClock(autojump_threshold=0))


class _Replaying:
    def __init__(self, traced: Sequence[list[Turn]], registry: Registry, settings: Settings, workers: int, model: EngineModel) -> None:
        self._traced = traced
        self._block_size = model.block_size
        fleet = Fleet(settings.probe, settings.gate, registry)
        self._engines = [SimulatedEngine(f"w{number}", model) for number in range(workers)]
        for engine in self._engines:
            fleet.admit(_worker(engine, model))
        self._path = Path(registry, Placer(registry, fleet, Routing(registry, settings.routing)), Metrics(fleet), retries=0)
        self._replayed: list[tuple[Turn, Timing]] = []
        self._failures: dict[str, int] = {}

    async def run(self) -> Replay:
        start = trio.current_time()
        async with trio.open_nursery() as engines:
            for engine in self._engines:
                engines.start_soon(engine.run)
            async with trio.open_nursery() as clients:
                for number, turns in enumerate(self._traced):
                    clients.start_soon(self._session, turns, start + number * _STAGGER)
            engines.cancel_scope.cancel()
        return Replay(self._replayed, self._failures, {engine.worker: engine.computed_tokens for engine in self._engines})

    async def _session(self, turns: Sequence[Turn], start: float) -> None:
        for number, turn in enumerate(turns):
            if turn.at is None:
                await trio.sleep(turn.after)
            else:
                await trio.sleep_until(start + turn.at)
            await self._turn(turn, number)

    async def _turn(self, turn: Turn, number: int) -> None:
        timing = Timing(trio.current_time())
        call = Call(
            id=f"{turn.session}-{timing.arrived:g}",
            token_ids=_tokens(turn, number, self._block_size),
            sampling=SamplingParams(max_tokens=turn.output_tokens),
            model=_MODEL,
            cache_salt=turn.salt,
            session_id=turn.session,
            headers={"x-session-id": turn.session},
            notes={NOTE: (turn, timing)},
        )
        try:
            with self._path.settling(call) as outcome:
                await self._path.unary(call, outcome)
                outcome.kind, outcome.status = "ok", 200
        except CallError as error:
            self._failures[error.message] = self._failures.get(error.message, 0) + 1
        else:
            self._replayed.append((turn, timing))


def _worker(engine: SimulatedEngine, model: EngineModel) -> Worker:
    worker = Worker(WorkerSettings(grpc="127.0.0.1:1", id=engine.worker))
    worker.info = WorkerInfo(
        models=(_MODEL,),
        model_id=_MODEL,
        max_model_len=2**31,
        kv_block_size=model.block_size,
        total_kv_blocks=model.kv_blocks,
        max_running_requests=model.max_running,
    )
    worker.lanes = (engine,)
    return worker


def _tokens(turn: Turn, number: int, block_size: int) -> list[int]:
    """Token ids that are equal where the blocks are; what fills no block is of this turn alone, which `number` tells from its session's."""
    content = b"".join([_content(block, 4 * block_size) for block in turn.blocks])[: 4 * turn.prompt_tokens]
    tail = shake_128(f"{number} {turn.session}".encode()).digest(4 * turn.prompt_tokens - len(content))
    return array("I", content + tail).tolist()


@lru_cache(maxsize=1 << 16)
def _content(block: int, size: int) -> bytes:
    return shake_128(b"%d" % block).digest(size)
