"""Many stand-in workers in few processes: `python -m tests.workers.crowd COUNT` serves COUNT of them in one.

What a fleet does as one, they answer when all of a process have been asked for it: who asks them one after the other gets no answer.
"""

import asyncio
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

from quart import Quart, request

from plugins.stand_in import server
from plugins.stand_in.engine.engine import Engine
from plugins.stand_in.options import Options
from plugins.stand_in.over_grpc.control import Control
from plugins.stand_in.over_http.app import create_app
from plugins.stand_in.server import Ready, serve
from tests.workers.processes import Command, Processes, json_lines
from tests.workers.running import RunningWorker

_PROJECT = Path(__file__).parent.parent.parent
#: Over gRPC and over HTTP.
_AS_ONE: Final = ("pause_generation", "resume_generation", "update_weight_version")
_AS_ONE_PATH: Final = "/collective_rpc"


@contextlib.contextmanager
def crowd(processes: int, each: int) -> Iterator[list[RunningWorker]]:
    """Run so many processes with so many stand-ins in each.

    Raises: `StartFailed`.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-crowd-") as folder:
        logs = [Path(folder, f"{number}.log") for number in range(processes)]
        argv = [sys.executable, "-m", "tests.workers.crowd", str(each)]
        with Processes([Command(argv, log, {"PYTHONPATH": str(_PROJECT)}) for log in logs]) as running:
            running.wait_until(lambda: all(log.exists() and len(json_lines(log)) == each for log in logs), timeout=120)
            yield [
                RunningWorker(
                    kind="stand-in",
                    grpc=f"127.0.0.1:{ready['grpc_port']}",
                    http=f"http://127.0.0.1:{ready['http_port']}",
                    model="tiny",
                    max_model_len=Options.max_model_len,
                    vocab_size=Options.vocab_size,
                    pids=(ready["pid"],),
                    log=log,
                )
                for log in logs
                for ready in json_lines(log)
            ]


def _answer_together(count: int) -> None:
    for name in _AS_ONE:
        setattr(Control, name, _together(getattr(Control, name), asyncio.Barrier(count)))
    loaded = asyncio.Barrier(count)

    def create(engine: Engine) -> Quart:
        app = create_app(engine)

        @app.before_request
        async def wait() -> None:
            if request.path == _AS_ONE_PATH:
                await loaded.wait()

        return app

    server.create_app = create


def _together(method: Callable[..., Awaitable[Any]], barrier: asyncio.Barrier) -> Callable[..., Awaitable[Any]]:
    async def answer(*arguments: Any) -> Any:
        await barrier.wait()
        return await method(*arguments)

    return answer


async def _serve(count: int) -> None:
    _answer_together(count)
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(count):
            tasks.create_task(serve(Options(model="tiny"), ending, _say))


def _say(ready: Ready) -> None:
    print(json.dumps({"grpc_port": ready.grpc_port, "http_port": ready.http_port, "pid": ready.pid}), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
