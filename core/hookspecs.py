"""Every hook that a plugin can implement, in the order of a call's life, then those beside the path.

A plugin is a class; its methods that carry `@hookimpl` are its hooks, and are found by their names. Arguments are passed by name, and
a plugin takes only those that it wants. Data-plane hooks are plain functions: they must not block. A spec that says "async" may be
an `async def`, which the core awaits.

What a hook may raise stands in its spec. Anything else is a fault of the plugin: that call ends with a 500 that names the plugin, and
no other call is touched. `HEADRACE_TRACE_HOOKS=1` prints each hook call, with arguments and result.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy
from msgspec import Struct

if TYPE_CHECKING:
    from core.call import Call, Outcome
    from core.fleet.cohort import Cohort
    from core.fleet.transport import WeightTransport
    from core.fleet.worker import Worker
    from core.northbound.models import ModelCard
    from core.proxy import Proxy
    from core.reply import GenerateReply, Output
    from core.routes import Routes

PROJECT = "headrace"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Choice(Struct, frozen=True):
    """The worker for a call, and why, in a few words (`kv: 4 of 6 blocks`)."""

    worker: "Worker"
    reason: str
    #: One of the worker's data-parallel ranks (`worker.info.ranks`); `None` leaves that to the worker.
    rank: int | None = None
    #: How many tokens of the prompt the policy takes to be cached there; `None` when it doesn't know.
    cached_tokens: int | None = None


class HookSpecs:
    """The specs. Plugins don't inherit from this class; it only holds the signatures."""

    # --- the life of a call -------------------------------------------------------------------------------------------------

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

        Raises: `CallError`, with which the call ends.

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

        Runs once, when every output is complete. May change `result`.

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

    # --- beside the path ----------------------------------------------------------------------------------------------------

    @hookspec
    def register_routes(self, routes: "Routes", proxy: "Proxy") -> None:
        """Add HTTP routes.

        Runs once, when the proxy opens. `routes.add("POST", "/my/route", handler)`; the handler is `async def (HTTPRequest) -> HTTPReply`
        and may raise `CallError`; what else it raises is a 500 that names the plugin. A handler that writes its answer piece by piece goes
        to `routes.add_streamed`; one whose answer is a worker's own awaits `proxy.relay(exchange)`. May add to `routes`; reads `proxy`,
        and changes nothing there.

        Raises: nothing; an error ends the start.

        Example: a page that says how many workers there are.

            @hookimpl
            def register_routes(self, routes: Routes, proxy: Proxy) -> None:
                async def count(request: HTTPRequest) -> HTTPReply:
                    return HTTPReply.json({"workers": len(proxy.fleet.workers)})

                routes.add("GET", "/count", count)
        """

    @hookspec
    def list_models(self) -> "Sequence[ModelCard] | None":
        """Name what else calls may put into `model`, beside the names that the workers serve: adapters, say.

        Runs at each `GET /v1/models`. A card that has no `max_model_len` gets that of the card whose name is its `parent`, because clients
        take the length from the card of the model that they ask for. A name that a worker serves keeps the worker's card. Changes nothing.

        Raises: `CallError`, which is then the answer.

        Example: an adapter.

            @hookimpl
            def list_models(self) -> Sequence[ModelCard]:
                return [ModelCard(id="math", root="/adapters/math", parent="tiny")]
        """

    @hookspec
    def explain_unready(self, model: str, workers: "Sequence[Worker]") -> "str | None":
        """Say what calls to a model lack, although a worker is there that answers whole calls.

        Runs at each `GET /health` and `GET /ready`, for each model of which such a worker is there, until one lacks nothing: then the
        answer is 200. `model` is its main name, `workers` are those of its workers that take calls, or will after a pause, whatever their
        roles. Returns why its calls can't be answered, `None` when they can. Changes nothing.

        Raises: nothing; an exception is a 500 that names the plugin.

        Example: no call without its judge.

            @hookimpl
            def explain_unready(self, model: str, workers: Sequence[Worker]) -> str | None:
                return None if self.judge_is_there else f"{model}: the judge of its {len(workers)} workers isn't there"
        """

    @hookspec
    def run_service(self, proxy: "Proxy") -> "Callable[[], Awaitable[None]] | None":
        """Run something for the proxy's whole life, in the proxy's own nursery: discovery, a broker, a subscription.

        Runs once, when the proxy opens; async: returns an async function without arguments, which the core starts, and cancels when the
        proxy closes. It may return early. The service may change the fleet through `proxy.fleet.serve`, and nothing else. Unless it is
        cancelled, an exception ends the service, is logged with the plugin's name, and leaves the proxy running.

        Raises: nothing; an error of the hook itself ends the start.

        Example: a worker that is known only at run time.

            @hookimpl
            def run_service(self, proxy: Proxy) -> Callable[[], Awaitable[None]]:
                async def service() -> None:
                    await proxy.fleet.serve(WorkerSettings(grpc=await self.look_up()))

                return service
        """

    @hookspec
    async def prepare_worker(self, worker: "Worker") -> None:
        """Bring a worker to where the fleet is, before it joins: adapters that the others hold, weights.

        Runs each time that a worker which was not there is reachable and healthy, before `worker_joined`; async, one plugin after the
        other. The worker gets no call until all have returned. May speak to the worker (`worker.control`, `worker.http`), and changes
        nothing on it that is headrace's.

        Raises: anything; the worker stays out, with the error and the plugin's name as its reason, and all is tried again at the next
        probe.

        Example: no worker without its adapter.

            @hookimpl
            async def prepare_worker(self, worker: Worker) -> None:
                await worker.control.load_lora(LoadLoraRequest(lora_name="math", source_path="/adapters/math"))
        """

    @hookspec
    def worker_joined(self, worker: "Worker") -> None:
        """A worker has joined the fleet: it was reached and introduced for the first time, or again after it was gone.

        Runs before it gets its first call; it may be paused still. Every plugin is told, whatever another one raises. Changes nothing.

        Raises: nothing; an exception is logged with the plugin's name.

        Example:

            @hookimpl
            def worker_joined(self, worker: Worker) -> None:
                self.load[worker.id] = 0
        """

    @hookspec
    def worker_left(self, worker: "Worker") -> None:
        """A worker is gone: it failed its probes, or was taken out.

        Runs after it has become ineligible; calls may still be in flight. Every plugin is told, whatever another one raises. Changes
        nothing.

        Raises: nothing; an exception is logged with the plugin's name.

        Example:

            @hookimpl
            def worker_left(self, worker: Worker) -> None:
                self.load.pop(worker.id, None)
        """

    @hookspec
    def weight_transports(self) -> "Sequence[WeightTransport] | None":
        """Offer ways by which new weights come into the workers, for `POST /fleet/updates`.

        Runs once, when the proxy opens. Returns the transports, see `WeightTransport`: the core pauses the workers, lets the transport
        bring each its weights, all at the same time, labels and checks them, and resumes. Changes nothing.

        Raises: nothing; an error ends the start, as do two transports of one name.

        Example: every worker loads the checkpoint that it has started with, again.

            class Reload:
                name = "reload"
                repeatable = True

                def parse(self, options: Mapping[str, Any]) -> None:
                    if options:
                        raise BadRequest(f"{min(options)}: this transport has no options", param=min(options))

                async def prepare(self, update: WeightUpdate) -> None:
                    pass

                async def apply(self, update: WeightUpdate, member: Member, control: WorkerControl) -> None:
                    await control.collective_rpc({"method": "reload_weights"})

            @hookimpl
            def weight_transports(self) -> Sequence[WeightTransport]:
                return [Reload()]
        """

    @hookspec(firstresult=True)
    def translate_weight_update(self, body: "Mapping[str, Any]") -> "Mapping[str, Any] | None":
        """Say what a body of `POST /update_weights` that isn't vLLM's means, in a trainer's dialect.

        Runs for each such body, whether it is for the fleet or for one worker, before a worker hears of it. Returns the body of the
        `/collective_rpc` that does the same (`method`, and as wanted `args`, `kwargs`, `timeout`), `None` to pass to the next plugin; a
        body that nobody knows is refused. A `weight_version` in it labels the weights of each worker afterwards. Changes nothing.

        Raises: `CallError` to refuse the update; `BadRequest` names the field.

        Example: weights that lie in a folder.

            @hookimpl
            def translate_weight_update(self, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
                if "folder" not in body:
                    return None
                return {"method": "reload_weights", "kwargs": {"weights_path": body["folder"]}}
        """

    @hookspec(firstresult=True)
    def number_ranks(self, body: "Mapping[str, Any]", cohort: "Cohort", index: int) -> "Mapping[str, Any] | None":
        """Give each worker its place in a trainer's group that it joins by a `/collective_rpc` to the whole fleet.

        Runs once for each member of the `cohort`, which `index` says, before a worker hears of it; not for a worker that is spoken to
        alone, since its trainer numbers by itself. `body` is what was posted. Returns what this member gets, `None` for a method that
        joins no group. A method that is numbered does: calls wait while the workers join, and from then on these, as they are, are who
        an update is for. Changes nothing.

        Raises: `BadRequest` when the trainer counts other ranks than there are.

        Example: a method `meet(port, first_rank)`.

            @hookimpl
            def number_ranks(self, body: Mapping[str, Any], cohort: Cohort, index: int) -> Mapping[str, Any] | None:
                if body["method"] != "meet":
                    return None
                return {**body, "kwargs": {**body["kwargs"], "first_rank": cohort.members[index].offset}}
        """

    @hookspec
    def session_finished(self, session_id: str) -> None:
        """A session is over: its client has said that no call with this `session_id` will come any more.

        Runs each time that a client says so, whoever it is: the id may be unknown, may have been told before, and calls of the session
        may still be in flight. A session that nobody ends is never told, so what is kept of sessions needs a bound of its own. Every
        plugin is told, whatever another one raises. Changes nothing.

        Raises: nothing; an exception is logged with the plugin's name.

        Example: forget where the session's calls went.

            @hookimpl
            def session_finished(self, session_id: str) -> None:
                self.homes.pop(session_id, None)
        """

    @hookspec
    def collect_metrics(self, registry: Any) -> None:
        """Register metrics: `registry` is the `prometheus_client.CollectorRegistry` behind `GET /metrics`.

        Runs once, when the proxy opens. Names start with `headrace_`. May add to `registry`, and changes nothing else.

        Raises: nothing; an error ends the start.

        Example:

            @hookimpl
            def collect_metrics(self, registry: CollectorRegistry) -> None:
                self.hits = Counter("headrace_my_hits", "Calls whose session was known", registry=registry)
        """


#: The hooks' names, in the order of a call's life.
HOOKS = tuple(name for name in vars(HookSpecs) if not name.startswith("_"))
#: Those in the life of a call.
CALL_HOOKS = frozenset(HOOKS[: HOOKS.index("call_settled") + 1])
