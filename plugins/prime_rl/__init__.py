"""Prime-RL's dialect: what its rollout clients and its orchestrator expect of a server beyond vLLM's own contract.

They point here unmodified. Most of what they need is the core's own (named tokens, the prompt's own token first, `usage`, sessions, the
worker's words for an over-long prompt, `/pause` and `/resume`); this plugin adds the rest.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from core import Call, Cohort, GenerateReply, PluginSettings, Proxy, Routes, Worker, hookimpl
from plugins.prime_rl.bridged import BridgedTurns
from plugins.prime_rl.broadcaster import Broadcaster, number
from plugins.prime_rl.finite import check_finite
from plugins.prime_rl.unknown_keys import UnknownKeys
from plugins.prime_rl.weight_dir import translate

#: For all workers, for one, and for those of a named cohort.
_SCOPES: Final = ("", "/workers/<id>", "/cohorts/<cohort>")


class Settings(PluginSettings, frozen=True):
    """`[plugins.prime-rl]`."""

    #: Keys of `sampling_params` that nobody knows: ignored `in-sessions`, that is in calls with `X-Session-ID`, which each rollout of
    #: Prime-RL has; ignored in every call (`ignore`); or refused, as the core does without this plugin (`refuse`). Each ignored key is
    #: logged once.
    unknown_sampling_keys: Literal["in-sessions", "ignore", "refuse"] = "in-sessions"
    #: Answer 500 instead of a unary reply in which the logprob of a token isn't finite; vLLM writes −9999.0 for it.
    finite_logprobs: bool = True
    #: After an update from a folder `…/step_7`, label the weights "7": the salt of the rollouts that begin with them.
    label_weights: bool = True


class PrimeRL:
    """Prime-RL's dialect of `/inference/v1/generate` and `/update_weights`, and its `/init_broadcaster`."""

    settings_type = Settings

    def __init__(self, settings: Settings) -> None:
        self._unknown_keys = settings.unknown_sampling_keys
        self._finite = settings.finite_logprobs
        self._label = settings.label_weights
        self._ignored = UnknownKeys()
        self._bridged = BridgedTurns()
        self._broadcaster: Broadcaster  # as soon as there are routes

    @hookimpl
    def register_routes(self, routes: Routes, proxy: Proxy) -> None:
        """See `core.hookspecs`."""
        self._broadcaster = Broadcaster(routes, proxy.administration)
        for scope in _SCOPES:
            routes.add("POST", f"{scope}/init_broadcaster", self._broadcaster.init)

    @hookimpl
    def translate_weight_update(self, body: Mapping[str, Any], workers: Sequence[Worker]) -> Mapping[str, Any] | None:
        """See `core.hookspecs`."""
        translated = translate(body, label=self._label)
        if translated:
            self._broadcaster.demand_joined(workers)
        return translated

    @hookimpl
    def number_ranks(self, body: Mapping[str, Any], cohort: Cohort, index: int) -> Mapping[str, Any] | None:
        """See `core.hookspecs`."""
        return number(body, cohort, index)

    @hookimpl(trylast=True)  # after every plugin that claims a key, or wants routed experts
    def receive_call(self, call: Call) -> None:
        """See `core.hookspecs`."""
        if call.unclaimed_sampling and (self._unknown_keys == "ignore" or (self._unknown_keys == "in-sessions" and call.session_id)):
            self._ignored.take(call)
        if call.sampling.routed_experts_prompt_start is not None and call.session_id:
            self._bridged.take(call)

    @hookimpl
    def lift_result(self, call: Call, result: GenerateReply) -> None:
        """See `core.hookspecs`."""
        if self._finite:
            check_finite(call, result)
