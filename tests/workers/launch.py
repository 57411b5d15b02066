"""How each kind of worker is started."""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tests.workers import cache, components, tiny_model, tiny_vision
from tests.workers.processes import Command, Processes, StartFailed, accepts, free_ports, get
from tests.workers.running import RunningWorker
from tests.workers.scripted_engine.settings import Settings

_PROJECT = Path(__file__).parent.parent.parent
_MODEL = "tiny"
_ATTEMPTS = 3

# Development routes, adapters at run time from anywhere, and nothing sent to anybody.
_SERVER_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES": "/",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

_CPU_ENGINE_ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@contextlib.contextmanager
def stand_in(**options: Any) -> Iterator[RunningWorker]:
    """Run the stand-in worker. Options are those of `python -m plugins.stand_in`, with `_` for `-`; a list repeats an option.

    Raises: `StartFailed`.
    """
    options = {"model": _MODEL, "max_model_len": tiny_model.MAX_MODEL_LEN, "vocab_size": tiny_model.VOCAB_SIZE} | options
    with _folder("stand-in") as folder:
        log = folder / "server.log"
        environment = _SERVER_ENVIRONMENT | {"PYTHONPATH": str(_PROJECT)}
        command = Command([sys.executable, "-m", "plugins.stand_in", *flags_of(options)], log, environment)
        with Processes([command]) as processes:
            processes.wait_until(lambda: _announcement(log) is not None, timeout=20)
            ports = _announcement(log) or {}
            yield RunningWorker(
                kind="stand-in",
                grpc=f"127.0.0.1:{ports['grpc_port']}",
                http=f"http://127.0.0.1:{ports['http_port']}",
                model=next(iter(options.get("served_model_name", ())), options["model"]),
                max_model_len=options["max_model_len"],
                vocab_size=options["vocab_size"],
                pids=processes.pids,
                log=log,
            )


@contextlib.contextmanager
def scripted(
    *,
    served_model_names: Sequence[str] = (_MODEL,),
    scale_out: bool = True,
    sees: bool = False,
    generation_config: Mapping[str, Any] | None = None,
    fail: Sequence[str] = (),
    extension_methods: Sequence[str] = (),
    server_arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    **settings: Any,
) -> Iterator[RunningWorker]:
    """Run the real server with a scripted engine, in development mode, with scale-out routes and adapters at run time.

    `fail` names utilities and worker methods that always fail, `extension_methods` further methods for `/collective_rpc`, each of which
    replaces the weights. With `sees` the model is the tiny Qwen3-VL, for which the server prepares media. `generation_config` is added to
    what the tiny one recommends. `server_arguments` go to `vllm-rs serve`, `environment` on top of its environment. `settings` are fields
    of `scripted_engine.settings.Settings`, such as `world_size`, `max_model_len`, `fast` or `tokens_per_step`; with a `data_parallel_size`
    of N there are N engine processes. With `fast` no events are logged.

    Raises: `InstallFailed`, `StartFailed`; `TypeError` for an unknown setting.
    """
    of_engine = Settings(**settings)
    binary = components.server_binary()
    with _folder("scripted") as folder:
        if sees:
            tiny_vision.write(folder / "model")
        else:
            tiny_model.write(folder / "model", vocab_size=of_engine.vocab_size, generation_config=generation_config)
        events = None if of_engine.fast else folder / "events.jsonl"

        def commands(http_port: int, grpc_port: int, handshake_port: int) -> list[Command]:
            serve = _serve(binary, folder / "model", http_port, grpc_port, served_model_names)
            serve += ["--enable-scale-out"] if scale_out else []
            serve += ["--data-parallel-size", str(of_engine.data_parallel_size), "--data-parallel-size-local", "0"]
            serve += ["--handshake-port", str(handshake_port), *server_arguments]
            started = [Command(serve, folder / "server.log", _SERVER_ENVIRONMENT | dict(environment or {}))]
            for rank in range(of_engine.data_parallel_size):
                options = settings | {"rank": rank, "events": events, "fail": fail, "extension_method": extension_methods}
                engine = [sys.executable, "-m", "tests.workers.scripted_engine", f"tcp://127.0.0.1:{handshake_port}", *flags_of(options)]
                started.append(Command(engine, folder / f"engine-{rank}.log", {"PYTHONPATH": str(_PROJECT)}))
            return started

        with _serving(commands, timeout=30) as (processes, http_port, grpc_port):
            yield RunningWorker(
                kind="scripted",
                grpc=f"127.0.0.1:{grpc_port}",
                http=f"http://127.0.0.1:{http_port}",
                model=served_model_names[0],
                max_model_len=of_engine.max_model_len,
                vocab_size=of_engine.vocab_size,
                pids=processes.pids,
                log=folder / "server.log",
                engine_log=events,
            )


@contextlib.contextmanager
def engine(
    *,
    served_model_names: Sequence[str] = (_MODEL,),
    model: Path | None = None,
    server: Path | None = None,
    lora: bool = True,
    engine_arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[RunningWorker]:
    """Run the real server with the real engine on the CPU, in development mode, with scale-out routes and adapters at run time.

    `model` is a folder, `checkpoint(0)` by default, `server` another binary than the engine's own. `engine_arguments` go to the engine
    (`--kv-events-config`, `--worker-extension-cls`, …), `environment` on top of the environment of both. Ready after 25 to 70 s on two
    cores; gives up after 300 s.

    Raises: `InstallFailed`, `StartFailed`.
    """
    binaries = components.engine_environment() / "bin"
    model = model or components.models() / "checkpoint-0"
    with _folder("engine") as folder:
        variables = _SERVER_ENVIRONMENT | _CPU_ENGINE_ENVIRONMENT
        variables |= {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "VLLM_RS_PYTHON": str(binaries / "python")}
        variables |= {"VLLM_CACHE_ROOT": str(cache.root() / "vllm-cache"), "VLLM_CONFIG_ROOT": str(folder)}
        arguments = ["--dtype", "float32", "--max-model-len", str(tiny_model.MAX_MODEL_LEN), "--enforce-eager"]
        arguments += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"] if lora else []

        def commands(http_port: int, grpc_port: int, _: int) -> list[Command]:
            serve = [*_serve(server or binaries / "vllm-rs", model, http_port, grpc_port, served_model_names), "--enable-scale-out"]
            return [Command([*serve, "--", *arguments, *engine_arguments], folder / "server.log", variables | dict(environment or {}))]

        with _serving(commands, timeout=300) as (processes, http_port, grpc_port):
            yield RunningWorker(
                kind="engine",
                grpc=f"127.0.0.1:{grpc_port}",
                http=f"http://127.0.0.1:{http_port}",
                model=served_model_names[0],
                max_model_len=tiny_model.MAX_MODEL_LEN,
                vocab_size=tiny_model.VOCAB_SIZE,
                pids=processes.pids,
                log=folder / "server.log",
            )


def seeing_engine(*engine_arguments: str) -> contextlib.AbstractContextManager[RunningWorker]:
    """The real engine with a tiny Qwen3-VL, see `tiny_vision`, as `engine` runs it."""
    path = {"PYTHONPATH": str(components.vision_packages())}
    return engine(model=components.variant_models() / "vision", lora=False, engine_arguments=engine_arguments, environment=path)


def encoding_engine(role: Literal["ec_producer", "ec_consumer"], shared: Path) -> contextlib.AbstractContextManager[RunningWorker]:
    """One of several `seeing_engine` that share what they have seen, as files in the folder `shared`.

    A producer does nothing but look at pictures: it has no KV cache, and makes no token. A consumer looks at those only that aren't there.
    """
    config = {"ec_connector": "ECExampleConnector", "ec_role": role, "ec_connector_extra_config": {"shared_storage_path": str(shared)}}
    return seeing_engine("--ec-transfer-config", json.dumps(config))


def routing_engine() -> contextlib.AbstractContextManager[RunningWorker]:
    """The newest server with an older engine that captures routed experts, and a tiny Qwen3-MoE. It can't be paused."""
    return engine(
        model=components.variant_models() / "experts",
        server=components.server_binary(),
        lora=False,
        engine_arguments=["--enable-return-routed-experts"],
        environment={"PYTHONPATH": str(components.routing_packages())},
    )


def receiving_engine() -> contextlib.AbstractContextManager[RunningWorker]:
    """The real engine as `engine` runs it, with every worker extension of ours, see `receivers`."""
    path = {"PYTHONPATH": f"{_PROJECT}{os.pathsep}{components.nixl_packages()}"}
    return engine(lora=False, engine_arguments=["--worker-extension-cls", "tests.workers.receivers.Receivers"], environment=path)


def handing_engine(*, lease: int) -> contextlib.AbstractContextManager[RunningWorker]:
    """The real engine as `engine` runs it, that hands KV blocks over to others of its kind, either way, by NIXL.

    A prefill's blocks are kept for `lease` seconds.
    """
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    config |= {"kv_connector_extra_config": {"kv_lease_duration": lease}}
    (port,) = free_ports(1)
    environment = {"PYTHONPATH": str(components.nixl_packages()), "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
    return engine(lora=False, engine_arguments=["--kv-transfer-config", json.dumps(config)], environment=environment)


@contextlib.contextmanager
def _serving(commands: Callable[[int, int, int], list[Command]], timeout: float) -> Iterator[tuple[Processes, int, int]]:
    """Start a server on free ports; with others, should somebody have taken one of them meanwhile."""
    for attempt in range(_ATTEMPTS):
        http_port, grpc_port, other_port = free_ports(3)
        with Processes(commands(http_port, grpc_port, other_port)) as processes:
            try:
                processes.wait_until(lambda: _serves(http_port, grpc_port), timeout)  # noqa: B023 - called in this round only
            except StartFailed as failure:
                if "Address already in use" in str(failure) and attempt + 1 < _ATTEMPTS:
                    continue
                raise
            yield processes, http_port, grpc_port
            return


def _serve(binary: Path, model: Path, http_port: int, grpc_port: int, names: Sequence[str]) -> list[str]:
    where = ["--host", "127.0.0.1", "--port", str(http_port), "--grpc-port", str(grpc_port)]
    return [str(binary), "serve", str(model), *where, "--served-model-name", *names]


def _serves(http_port: int, grpc_port: int) -> bool:
    return get(f"http://127.0.0.1:{http_port}/health") is not None and accepts(grpc_port)


def _announcement(log: Path) -> dict[str, int] | None:
    """The line with which the stand-in says where it listens."""
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        with contextlib.suppress(ValueError):
            announcement = json.loads(line)
            if isinstance(announcement, dict) and {"grpc_port", "http_port"} <= announcement.keys():
                return announcement
    return None


def flags_of(options: Mapping[str, Any]) -> list[str]:
    """Command-line flags: booleans as `--flag` and `--no-flag`, sequences as repeated flags, `None` not at all."""
    flags: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else "--no-" + flag.removeprefix("--"))
        elif isinstance(value, list | tuple):
            flags += [part for item in value for part in (flag, str(item))]
        elif value is not None:
            flags += [flag, str(value)]
    return flags


@contextlib.contextmanager
def _folder(kind: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=f"headrace-{kind}-", ignore_cleanup_errors=True) as name:
        yield Path(name)
