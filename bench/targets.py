"""What requests are sent to: the worker itself, headrace in front of it, and peers in front of it."""

import contextlib
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import peers
from bench.cases import GENERATE, Case, Dialect, Engine
from bench.load import LoadFailed, post, run
from bench.processes import family
from bench.results import Missing
from tests.workers import RunningWorker
from tests.workers.processes import Command, Processes, StartFailed, free_ports, get

_PROJECT = Path(__file__).parent.parent
_START_SECONDS = 60.0

#: The target with which streams are compared, and the one with which whole replies are.
YARDSTICK = "hypercorn alone"
DYNAMO = "dynamo"


@dataclass(frozen=True)
class Target:
    """Something that answers generate requests."""

    name: str
    address: tuple[str, int]
    #: the proxy's processes with all descendants; none for the worker itself
    pids: tuple[int, ...] = ()
    #: how a streamed request is sent, where not as every other
    streams: Dialect = "generate"

    def dialect(self, case: Case) -> Dialect:
        """How requests of this case are written."""
        return self.streams if case.stream else "generate"

    def requests(self, case: Case) -> list[bytes]:
        """Whole HTTP requests, to be sent in turn."""
        dialect = self.dialect(case)
        path = GENERATE if dialect == "generate" else "/v1/completions"
        host = "{}:{}".format(*self.address)
        return [post(host, path, body) for body in case.bodies(dialect)]


def direct(worker: RunningWorker) -> Target:
    """The worker's own HTTP server."""
    return Target("direct", _address(worker.http))


@contextlib.contextmanager
def targets(worker: RunningWorker, engine: Engine, *, with_peers: bool, missing: list[Missing]) -> Iterator[list[Target]]:
    """Everything in front of one worker, the worker itself first. A peer that can't be had is put on the list of what is missing.

    Beside a paced engine there is also the yardstick of its streams.

    Raises: `StartFailed` when headrace doesn't start.
    """
    with contextlib.ExitStack() as stack:

        def enter(start: Callable[[RunningWorker, Path], contextlib.AbstractContextManager[Target]]) -> Target:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-", ignore_cleanup_errors=True))
            return stack.enter_context(start(worker, Path(folder)))

        found = [direct(worker), enter(headrace), enter(headrace_on_hypercorn)]
        if engine == "paced":
            found.append(enter(hypercorn_alone))
        for name, start in _PEERS.items() if with_peers else ():
            try:
                found.append(enter(start))
            except (StartFailed, peers.NotInstalled) as failure:
                missing.append(Missing(name, None, str(failure)))
        yield found


@contextlib.contextmanager
def headrace(worker: RunningWorker, folder: Path) -> Iterator[Target]:
    """`headrace serve`. Raises: `StartFailed`."""
    (port,) = free_ports(1)
    argv = [sys.executable, "-m", "core.cli", "serve", "--config", str(_configure(worker, folder)), "--port", str(port)]
    with _proxy("headrace", [Command(argv, folder / "log", {"PYTHONPATH": str(_PROJECT)})], port) as target:
        yield target


@contextlib.contextmanager
def headrace_on_hypercorn(worker: RunningWorker, folder: Path) -> Iterator[Target]:
    """`hypercorn -k trio core.app`. Raises: `StartFailed`."""
    (port,) = free_ports(1)
    environment = {"HEADRACE_CONFIG": str(_configure(worker, folder)), "PYTHONPATH": str(_PROJECT)}
    argv = [sys.executable, "-m", "hypercorn", "-k", "trio", "--bind", f"127.0.0.1:{port}", "core.app"]
    with _proxy("headrace, hypercorn -k trio", [Command(argv, folder / "log", environment)], port) as target:
        yield target


@contextlib.contextmanager
def hypercorn_alone(_worker: RunningWorker, folder: Path) -> Iterator[Target]:
    """hypercorn and an application that makes its tokens up, see `bench.echo`. Raises: `StartFailed`."""
    (port,) = free_ports(1)
    argv = [sys.executable, "-m", "hypercorn", "-k", "trio", "--bind", f"127.0.0.1:{port}", "bench.echo:app"]
    with _proxy(YARDSTICK, [Command(argv, folder / "log", {"PYTHONPATH": str(_PROJECT)})], port) as target:
        yield target


@contextlib.contextmanager
def dynamo(worker: RunningWorker, folder: Path) -> Iterator[Target]:
    """NVIDIA Dynamo: its frontend and its vLLM sidecar, which find each other through files.

    Raises: `StartFailed`, `NotInstalled`.
    """
    python = peers.dynamo() / "bin" / "python"
    (port,) = free_ports(1)
    environment = {
        "DYN_VLLM_ENABLE_INFERENCE_V1_GENERATE": "1",
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(folder / "discovery"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_LOG": "warn",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(folder),
    }
    frontend = [python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
    sidecar = [python, "-m", "dynamo.vllm.sidecar", "--grpc-endpoint", worker.grpc]
    commands = [Command(frontend, folder / "frontend.log", environment), Command(sidecar, folder / "sidecar.log", environment)]
    with _proxy(DYNAMO, commands, port, streams="completions") as target:
        yield target


@contextlib.contextmanager
def vllm_router(worker: RunningWorker, folder: Path) -> Iterator[Target]:
    """vLLM's router. Raises: `StartFailed`, `NotInstalled`."""
    binary = peers.vllm_router() / "bin" / "vllm-router"
    port, metrics_port = free_ports(2)
    argv = [binary, "--worker-urls", worker.http, "--port", str(port), "--policy", "round_robin"]
    argv += ["--prometheus-port", str(metrics_port), "--max-payload-size", str(1 << 28), "--log-level", "warning"]
    with _proxy("vllm-router", [Command(argv, folder / "log", {})], port) as target:
        yield target


_PEERS = {DYNAMO: dynamo, "vllm-router": vllm_router}

#: What a reader of the table must know about a target.
NOTES = {
    "headrace": "headrace serve",
    YARDSTICK: "no proxy: the same events at the same pace out of nothing, on hypercorn's trio worker",
    DYNAMO: "frontend and vLLM sidecar; streams by POST /v1/completions, which writes text: its generate route refuses stream: true",
    "vllm-router": f"relays the bytes of POST {GENERATE} to the worker's HTTP server",
}


@contextlib.contextmanager
def _proxy(name: str, commands: Sequence[Command], port: int, *, streams: Dialect = "generate") -> Iterator[Target]:
    with Processes(commands) as processes:
        address = ("127.0.0.1", port)
        processes.wait_until(functools.partial(_answers, Target(name, address)), _START_SECONDS)
        yield Target(name, address, tuple(family(processes.pids)), streams)


def _answers(target: Target) -> bool:
    if get("http://{}:{}/health".format(*target.address)) is None:
        return False
    try:
        run(target.address, target.requests(_SMALLEST), count=1, concurrency=1)
    except LoadFailed:
        # It listens, but doesn't know the worker yet.
        time.sleep(0.2)
        return False
    return True


_SMALLEST = Case("one token", prompt=1, output=1, concurrency=1, requests=1)


def _configure(worker: RunningWorker, folder: Path) -> Path:
    path = folder / "headrace.toml"
    workers = f'[[workers]]\ngrpc = "{worker.grpc}"\nhttp = "{worker.http}"\n'
    path.write_text(workers + '[plugins]\ndisable = ["stand-in"]\n', encoding="utf-8")
    return path


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)
