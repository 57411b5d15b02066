"""The engine: one object that both wires speak to."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b

from plugins.stand_in.engine.adapters import Adapters
from plugins.stand_in.engine.call import Call, Event, Finish, PromptRead, Row, Step
from plugins.stand_in.engine.checks import Plan, check
from plugins.stand_in.engine.encoder import Encoder
from plugins.stand_in.engine.generation import Generation
from plugins.stand_in.engine.handoff import cached_remotely, remote_blocks
from plugins.stand_in.engine.model import Model
from plugins.stand_in.engine.prefix_cache import Namespace
from plugins.stand_in.engine.rank import Rank
from plugins.stand_in.engine.refusal import EngineDead, Paused, Problem, Refused
from plugins.stand_in.engine.scheduler import PauseMode, Scheduler
from plugins.stand_in.engine.weights import Weights
from plugins.stand_in.options import Options
from plugins.stand_in.side_channel import pull


class Engine:
    """A worker without its wires: calls, pauses, weights, adapters, caches.

    Once it is dead (`scheduler.dead`), calls raise `EngineDead` and administration is refused as INTERNAL, for good.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.scheduler = Scheduler(options.token_delay)
        self.weights = Weights(options.weight_transfer_backend, options.world_size)
        self.adapters = Adapters(enabled=options.enable_lora, reserved=options.names)
        self.encoder = Encoder(options.ec_transfer)
        self.ranks = tuple(Rank(number, options) for number in range(options.data_parallel_size))
        self._model = Model(options.vocab_size)

    def admit(self, call: Call) -> Plan:
        """Check a call before anything of it is answered. Refused: INVALID; `EngineDead`."""
        plan = check(call, self.options)
        if self.scheduler.dead:
            raise EngineDead
        return plan

    async def run(self, plan: Plan) -> AsyncGenerator[Event, None]:
        """Run an admitted call: `PromptRead` with the first token, then steps, the last of them with the finish.

        A call that names no rank goes to the one with the fewest calls, the first of these.

        The first token is a step of its own, then each step has `stream_interval` tokens (vLLM's output processor).

        Raises `Paused` (after `PromptRead`, as vLLM 0.33 does), `EngineDead`, or why the server ends its calls. Refused: INTERNAL when the
        blocks of a remote prefill can't be had.
        Closing the generator takes the call out of the engine.
        """
        more = _beside_the_weights(plan.call)
        generation = Generation(plan, self.options, lambda context: self._model.distribution(context, self.weights.identity + more))
        rank = self._rank(plan.call.data_parallel_rank)
        with self.scheduler.enter(plan.call.request_id, rank.number) as entry:
            try:
                moving = await self.scheduler.start(entry)
            except Paused:
                yield PromptRead(plan.prompt)
                raise
            if moving and (params := remote_blocks(plan)) and not await pull(params, self.options.kv_transfer_delay):
                raise Refused(Problem.INTERNAL, "engine failed during generation")
            if moving:
                self.encoder.see(plan.call.media)
            if moving and self.encoder.is_all:
                yield PromptRead(plan.prompt)
                yield Step((), (), finish=Finish("stop", 0, 0, ec_transfer_params=self.encoder.hand_over(plan.call.media)))
                return
            prompt = PromptRead(plan.prompt, await self._prefill(plan, generation, rank) if moving else None)
            sent = False
            while generation.finish is None:
                if moving:
                    self._forward(generation, rank)
                else:
                    generation.abort()
                if generation.finish is not None:
                    self._complete(plan, generation, rank)
                if generation.finish is not None or not sent or generation.pending >= plan.call.stream_interval:
                    if not sent:
                        yield prompt
                    yield generation.take()
                    sent = True
                if generation.finish is None:
                    moving = await self.scheduler.turn(entry)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pause; returns when the engine is idle. Cancelled while it waits, the engine stays paused."""
        with self.utility("pause_generation"):
            await self.scheduler.pause(mode)
            if clear_cache:
                self.clear_prefix_caches()

    def clear_prefix_caches(self) -> None:
        """Forget the blocks of every rank."""
        for rank in self.ranks:
            rank.prefix_cache.clear()

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Pause, and from level 1 on drop the KV cache and move the weights away; level 2 loses them.

        Refused: INTERNAL without sleep mode (the gRPC server checks that before it asks).
        """
        with self.utility("sleep"):
            if not self.options.enable_sleep_mode:
                raise ValueError("sleep mode is not enabled")
            await self.scheduler.pause(mode)
            self.scheduler.sleep({"weights", "kv_cache"} if level else set())
            if level:
                self.clear_prefix_caches()
            if level >= 2:
                self.weights.lose()

    def wake_up(self, tags: list[str]) -> None:
        """Wake up what the tags name (none: everything); unknown tags are fine."""
        with self.utility("wake_up"):
            if not self.options.enable_sleep_mode:
                raise ValueError("sleep mode is not enabled")
            self.scheduler.wake(set(tags) or {"weights", "kv_cache"})

    @contextmanager
    def utility(self, method: str) -> Iterator[None]:
        """Something asked of the engine itself; `method` names it in errors.

        Refused: INTERNAL when the engine is dead, or where the block raises ValueError because the engine can't do it.
        """
        if self.scheduler.dead:
            raise Refused(Problem.INTERNAL, f"{method} failed: engine core reported fatal failure")
        try:
            yield
        except ValueError as error:
            raise Refused(Problem.INTERNAL, f"{method} failed: {error}") from error

    def _rank(self, number: int | None) -> Rank:
        return self.ranks[number] if number is not None else min(self.ranks, key=lambda rank: sum(self.scheduler.counts(rank.number)))

    async def _prefill(self, plan: Plan, generation: Generation, rank: Rank) -> Sequence[Row] | None:
        call = plan.call
        self._demand_weights()
        rank.prompt_tokens += len(plan.prompt)
        reads = not call.bypass_prefix_cache and call.sampling.prompt_logprobs is None
        found = rank.prefix_cache.find(plan.prompt, _namespace(call)) if reads else 0
        remote = cached_remotely(plan)
        generation.cached_tokens = found if remote is None else remote
        rank.prefix_cache.store(plan.prompt, _namespace(call))
        return await generation.prompt_rows()

    def _forward(self, generation: Generation, rank: Rank) -> None:
        self._demand_weights()
        generation.forward(self.weights.version)
        rank.output_tokens += 1

    def _demand_weights(self) -> None:
        if self.weights.meta:
            self.scheduler.die()
            raise EngineDead

    def _complete(self, plan: Plan, generation: Generation, rank: Rank) -> None:
        # The last token was never computed on, so its KV does not exist.
        rank.prefix_cache.store([*plan.prompt, *generation.output[:-1]], _namespace(plan.call))
        if generation.finish is not None and generation.finish.reason != "abort":
            params, seen = rank.handoffs.hand_over(plan, generation.cached_tokens), self.encoder.hand_over(plan.call.media)
            generation.finish = replace(generation.finish, kv_transfer_params=params, ec_transfer_params=seen)


def _beside_the_weights(call: Call) -> bytes:
    """What a call's tokens depend on beside its context and the weights of the base model."""
    seen = blake2b(repr(call.media).encode(), digest_size=16).digest() if call.media else b""
    return (call.adapter.weights if call.adapter else b"") + seen


def _namespace(call: Call) -> Namespace:
    return Namespace(call.salt or "", call.adapter, call.media)
