"""The life of a call, in its order."""

from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from core.hookspecs.markers import hookspec

if TYPE_CHECKING:
    from core.call import Call, Outcome
    from core.fleet.worker import Worker
    from core.reply import GenerateReply, Output


class Choice(Struct, frozen=True):
    """The worker for a call, and why, in a few words (`kv: 4 of 6 blocks`)."""

    worker: "Worker"
    reason: str
    #: One of the worker's data-parallel ranks (`worker.info.ranks`); `None` leaves that to the worker.
    rank: int | None = None
    #: How many tokens of the prompt the policy takes to be cached there; `None` when it doesn't know.
    cached_tokens: int | None = None


class CallSpecs:
    """What a plugin can do about a call."""

    @hookspec
    def receive_call(self, call: "Call") -> None:
        """Check a call, complete it, or refuse it.

        Runs once per call, first of all hooks. May change everything on `call`. A key of the body that the core does not know lies in
        `call.unclaimed` (`call.unclaimed_sampling` for `sampling_params`): pop it to honour it, or the call is refused.

        Raises: `CallError` to refuse the call; `BadRequest` names the field.

        Example: a house rule, no prompt above a thousand tokens.

            @hookimpl
            def receive_call(self, call: Call) -> None:
                if len(call.token_ids) > 1000:
                    raise BadRequest("token_ids: at most 1,000 are allowed here", param="token_ids")
        """

    @hookspec
    def prepare_call(self, call: "Call") -> "Awaitable[None] | None":
        """Finish what `receive_call` began, when that takes long: work for a thread, a look-up elsewhere.

        Runs once per call, after every `receive_call`, one plugin after the other, before what is unclaimed is refused; async: returns an
        awaitable, which the core awaits, or `None` for a call with nothing to wait for. A call may wait here for as long as the plugin
        likes, and no other call waits with it. May change everything on `call`. It is cancelled when the client goes.

        Raises: `CallError` to refuse the call.

        Example: prompts that the client stores elsewhere.

            @hookimpl
            def prepare_call(self, call: Call) -> Awaitable[None] | None:
                if "prompt_uri" not in call.unclaimed:
                    return None
                return self.fetch_prompt(call)
        """

    @hookspec
    def identify_call(self, call: "Call") -> None:
        """Say what makes this call share KV blocks with others.

        Runs once per call, after every `receive_call` and `prepare_call`. Replaces `call.identity` (`msgspec.structs.replace`) and nothing
        else; the core has put the salt into `namespace` and the adapter into `adapter`. The namespace that is there afterwards is what the
        engine gets for its salt, so that routing and engines keep apart the same calls: at most 128 characters, none of `@ / \\ NUL`
        (vLLM 0.33). Where it depends on the worker, `per_worker` gives what comes behind it there.

        Raises: `CallError`.

        Example: keep tenants apart.

            @hookimpl
            def identify_call(self, call: Call) -> None:
                tenant = call.headers.get("x-tenant", "")
                call.identity = replace(call.identity, namespace=f"{tenant}.{call.identity.namespace}")
        """

    @hookspec
    def begin_attempt(self, call: "Call") -> "Awaitable[Call | None] | None":
        """Do what has to be done elsewhere before a call is placed, and say what is placed then.

        Runs once per attempt, when the call has passed the gate, one plugin after the other; async: returns an awaitable, which the core
        awaits, or `None` for a call with nothing to begin with. The awaitable gives the call that is placed, lowered and sent in the place
        of `call` (a copy, `msgspec.structs.replace`), or `None` to go on with `call`; the next plugin gets that one. The hooks that follow
        on the reply, and `call_settled`, have the client's own call. `proxy.leg` runs a part of a call on another worker. Changes nothing
        but the `notes` of the call.

        It is cancelled when the client goes. What it has begun on workers is then its own to end; a call that has something to end there
        sets `hold`. When the fleet is paused meanwhile, or the attempt fails, all begins anew. Not for calls whose body goes on as it is.

        Raises: `CallError`, with which the call ends; `CallAborted`, when it was aborted there.

        Example: the prompt's beginning is warmed up on the worker's cache first.

            @hookimpl
            def begin_attempt(self, call: Call) -> Awaitable[Call | None] | None:
                return self.warm_up(call) if call.session_id in self.cold else None
        """

    @hookspec
    def explain_attempt(self, call: "Call") -> "Sequence[str] | None":
        """Say what `begin_attempt` would do elsewhere for a call that isn't sent.

        Runs when somebody asks where a call would go (`headrace route`, `POST /fleet/route`), after `identify_call`. Returns a line for
        each thing that comes before the call is placed, or why nothing does; `None` when there is nothing to say. Must not block, and
        changes nothing: nothing follows.

        Raises: nothing; an exception is shown with the plugin's name.

        Example: the prompt's beginning would be warmed up.

            @hookimpl
            def explain_attempt(self, call: Call) -> Sequence[str] | None:
                return ["warm-up first"] if call.session_id in self.cold else None
        """

    @hookspec
    def eligible_workers(self, call: "Call", workers: "Sequence[Worker]") -> "Sequence[Worker] | None":
        """Narrow the workers that may take a call.

        Runs once per attempt, with the workers that are ready, serve the call's model, have its role and a wire that carries what it
        needs, less those that failed it already. Returns those of `workers` that may take the call, `None` for all of them. The core keeps
        what every plugin has kept. May change nothing.

        Raises: `NoWorker` (503), or another `CallError`, when nobody is left and the plugin knows why.

        Example: long prompts go to the big machines.

            @hookimpl
            def eligible_workers(self, call: Call, workers: Sequence[Worker]) -> Sequence[Worker] | None:
                return [w for w in workers if w.world_size >= 8] if len(call.token_ids) > 100_000 else None
        """

    @hookspec(firstresult=True)
    def choose_worker(self, call: "Call", workers: "Sequence[Worker]") -> "Choice | None":
        """Pick the worker for a call.

        Runs once per attempt, after every `eligible_workers`, with at least one worker left, in the order that `policies` has for the
        call (`[routing]`, or one of its rules); the first plugin that returns a choice wins, `None` passes to the next. A plugin with
        this hook is a policy: as long as no rule names it, none of its hooks in the life of a call run.

        Must not block, and has about 100 µs. It may read anything on `call` and `workers`, and changes nothing, on itself neither: it may
        be asked without anything following (`headrace route`). What it counts, it counts in `attempt_started`.
        A `Choice` carries the worker, one of its data-parallel ranks if that matters, and a short reason, which the reply header
        `x-headrace-route` shows. When the client has asked for a rank (`call.data_parallel_rank`), every worker has it, and the call goes
        there whatever the choice says.

        Raises: `NoWorker` to refuse the call (503, with its text).

        Example: always the first.

            @hookimpl
            def choose_worker(self, call: Call, workers: Sequence[Worker]) -> Choice:
                return Choice(workers[0], "first")
        """

    @hookspec
    def attempt_started(self, call: "Call", choice: "Choice") -> None:
        """Learn that a call now goes to a worker: to `choice`, whichever policy has made it.

        Runs once per attempt, right after the choice, before anything is sent. `attempt_ended` follows for each, without exception. Every
        plugin is told, whatever another one raises. A policy that comes into force while calls are in flight is told of them then.
        Changes nothing on `call`.

        Raises: nothing; an exception is logged with the plugin's name.

        Example: count the prompts on a worker.

            @hookimpl
            def attempt_started(self, call: Call, choice: Choice) -> None:
                self.load[choice.worker.id] += len(call.token_ids)
        """

    @hookspec
    def attempt_ended(self, call: "Call", choice: "Choice", output_tokens: int) -> None:
        """Learn that a call is no longer on the worker of an earlier `attempt_started`, which had the same `call` and `choice`.

        Runs once per attempt, when its worker has answered, failed, or been released; then comes the next attempt, or the end of the call.
        `output_tokens` is how many tokens were seen: 0 of a relayed call, and of a unary one that got no answer. Every plugin is told,
        whatever another one raises. A policy that ceases to be in force while calls are in flight is told so of them then. Changes nothing.

        Raises: nothing; an exception is logged with the plugin's name.

        Example: count the prompts on a worker.

            @hookimpl
            def attempt_ended(self, call: Call, choice: Choice, output_tokens: int) -> None:
                self.load[choice.worker.id] -= len(call.token_ids)
        """

    @hookspec
    def lower_call(self, call: "Call", worker: "Worker", request: Any) -> None:
        """Edit what goes to the worker.

        Runs once per attempt and output (`n` of them), after the core has filled `request`: a protobuf `GenerateRequest` when the call
        goes over gRPC, the JSON body as a `dict` when it goes over HTTP. Of a call whose body goes on as it is (`call.relayed`), the
        dict has the body's own members, each a `msgspec.Raw` unless it was replaced. May change `request` and nothing else.

        Raises: `CallError`.

        Example: everything of the night shift is less urgent.

            @hookimpl
            def lower_call(self, call: Call, worker: Worker, request: Any) -> None:
                if isinstance(request, GenerateRequest):
                    request.priority += 10
        """

    @hookspec
    def lift_output(self, call: "Call", output: "Output") -> None:
        """Edit one message of a stream.

        Runs for every message that a worker sends for a streamed call, before it is written to the client. Unary calls have
        `lift_result`. May change `output`. It is on the path of every token: implement it only when there is no other way.

        Raises: `CallError`, which ends the stream with that error.

        Example: clients that want the name of the token, not a placeholder.

            @hookimpl
            def lift_output(self, call: Call, output: Output) -> None:
                for entry in output.choice.logprobs.content if output.choice.logprobs else ():
                    entry.token = self.names[entry.token_id]
        """

    @hookspec
    def lift_result(self, call: "Call", result: "GenerateReply") -> None:
        """Edit the reply of a unary call.

        Runs once, when every output is complete; not for a call that was aborted at the gate, of which no worker has said
        anything. May change `result`.

        Raises: `CallError`, which is then the answer instead.

        Example: refuse logprobs that no trainer can use.

            @hookimpl
            def lift_result(self, call: Call, result: GenerateReply) -> None:
                if any(e.logprob == -9999.0 for c in result.choices if c.logprobs for e in c.logprobs.content):
                    raise CallError(500, "a sampled token has no finite logprob")
        """

    @hookspec
    def call_settled(self, call: "Call", outcome: "Outcome") -> None:
        """Learn how a call ended.

        Runs exactly once for every call that reached `receive_call`, whatever its end: answered, refused, failed, given up by its
        client, cancelled; `outcome` tells. The reply is already written, or never will be. Every plugin is told, whatever another one
        raises. Changes nothing.

        Raises: nothing; an exception is logged with the plugin's name.

        Example: count tokens per session.

            @hookimpl
            def call_settled(self, call: Call, outcome: Outcome) -> None:
                self.tokens[call.session_id] += outcome.output_tokens
        """
