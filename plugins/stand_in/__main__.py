"""`python -m plugins.stand_in`: run one stand-in worker."""

import asyncio

import click

from plugins.stand_in.command_line import PROGRAM, command
from plugins.stand_in.options import Options
from plugins.stand_in.server import run


def serve(options: Options) -> None:
    """Run it until it is told to end. Raises: `ClickException` when it can't listen."""
    try:
        asyncio.run(run(options))
    except OSError as error:
        raise click.ClickException(f"can't listen on {options.host}: {error}") from error


if __name__ == "__main__":
    command.main(prog_name=PROGRAM, obj=serve)
