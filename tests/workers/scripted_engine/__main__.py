"""Command line: `python -m tests.workers.scripted_engine tcp://127.0.0.1:PORT [options]`."""

import argparse
import dataclasses
import os
import signal
import sys
from pathlib import Path

from tests.workers.scripted_engine.behaviour import EngineDied
from tests.workers.scripted_engine.engine import Engine, EventLog
from tests.workers.scripted_engine.settings import Settings
from tests.workers.scripted_engine.wire import Link


def main() -> int:
    """Serve until told to stop. Returns 1 when the engine died by script."""
    parser = argparse.ArgumentParser(prog="scripted_engine", description="An engine for vllm-rs that follows a script")
    parser.add_argument("handshake", help="the front end's handshake address")
    parser.add_argument("--events", type=Path, help="append what reaches the engine to this file, one JSON object a line")
    parser.add_argument("--fail", action="append", default=[], metavar="UTILITY", help="let every call of it fail")
    parser.add_argument("--extension-method", action="append", default=[], metavar="NAME", help="a worker extension's method")
    for field in dataclasses.fields(Settings):
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            parser.add_argument(flag, type=type(field.default), default=field.default)
    options = vars(parser.parse_args())

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    settings = Settings(**{field.name: options[field.name] for field in dataclasses.fields(Settings)})
    log = EventLog(options["events"], settings.rank)
    link = Link(options["handshake"], settings.rank, settings.ready_response())
    log.write("init", addresses=link.addresses)
    engine = Engine(link, settings, log, failing=options["fail"], extension_methods=options["extension_method"])
    try:
        engine.serve()
    except EngineDied as death:
        log.write("died", announced=death.announced)
        if not death.announced:
            os._exit(1)
        link.send_death()
        link.close()
    return 1


sys.exit(main())
