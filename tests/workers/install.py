"""Install the real workers: `python -m tests.workers.install [--only vllm-rs|engine|nixl|variants]`. A second run takes no time."""

import argparse
import sys

from tests.workers import cache, components
from tests.workers.components import ENGINE_VERSION, SERVER_VERSION


def main() -> int:
    """Install what was asked for, and say where it is. Returns 1 with a reason when that's impossible."""
    parser = argparse.ArgumentParser(prog="python -m tests.workers.install", description="Install the real workers for the tests.")
    parts = (
        f"vllm-rs: the server {SERVER_VERSION} for the scripted engine; engine: server and engine {ENGINE_VERSION}, and a tiny model; "
        "nixl: what carries weights and KV blocks between processes; "
        "variants: engines with a model that sees, and with one that reports its routing"
    )
    installers = {
        "vllm-rs": components.server_binary,
        "engine": components.models,
        "nixl": components.nixl_packages,
        "variants": components.variants,
    }
    parser.add_argument("--only", choices=list(installers), help=parts)
    only = parser.parse_args().only
    for component, install in installers.items():
        if only in (None, component):
            if reason := components.why_not(component):
                cache.progress(f"{component}: {reason}")
                return 1
            try:
                cache.progress(f"{component}: ready in {install()}")
            except components.InstallFailed as failure:
                cache.progress(f"{component}: {failure}")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
