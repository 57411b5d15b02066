"""Prime-RL's dialect on the data plane: what its rollout clients expect of a server beyond vLLM's own contract.

Its orchestrator and environment servers point here unmodified. Most of what they need is the path's own (named tokens, the prompt's
own token first, `usage`, sessions, the worker's words for an over-long prompt); this plugin adds the rest.
"""

from typing import Literal

from core import Call, GenerateReply, HTTPReply, HTTPRequest, PluginSettings, Proxy, Routes, hookimpl
from plugins.prime_rl.bridged import BridgedTurns
from plugins.prime_rl.finite import check_finite
from plugins.prime_rl.sessions import session_of
from plugins.prime_rl.unknown_keys import UnknownKeys


class Settings(PluginSettings, frozen=True):
    """`[plugins.prime-rl]`."""

    #: Keys of `sampling_params` that nobody knows: ignored `in-sessions`, that is in calls with `X-Session-ID`, which each rollout of
    #: Prime-RL has; ignored in every call (`ignore`); or refused, as the core does without this plugin (`refuse`). Each ignored key is
    #: logged once.
    unknown_sampling_keys: Literal["in-sessions", "ignore", "refuse"] = "in-sessions"
    #: Answer 500 instead of a unary reply in which the logprob of a token isn't finite; vLLM writes −9999.0 for it.
    finite_logprobs: bool = True


class PrimeRL:
    """Prime-RL's dialect of `/inference/v1/generate`, and its `/finish_session`."""

    settings_type = Settings

    def __init__(self, settings: Settings) -> None:
        self._unknown_keys = settings.unknown_sampling_keys
        self._finite = settings.finite_logprobs
        self._ignored = UnknownKeys()
        self._bridged = BridgedTurns()

    @hookimpl
    def register_routes(self, routes: Routes, proxy: Proxy) -> None:
        """See `core.hookspecs`."""

        async def finish_session(request: HTTPRequest) -> HTTPReply:
            proxy.finish_session(session_of(request))
            return HTTPReply.json({"status": "ok"})

        routes.add("POST", "/finish_session", finish_session)

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
