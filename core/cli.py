"""The command line: `headrace serve`, `headrace plugins`."""

import json
import sys
from functools import partial

import click
from msgspec.structs import replace

from core.loading import load_plugins
from core.proxy import open_asgi
from core.registry import Registry
from core.remote.fleet import fleet
from core.remote.route import route
from core.remote.update import update
from core.serving.server import ServeOptions
from core.serving.server import serve as run_server
from core.settings import Settings, SettingsError, load_settings
from core.simulation.command import simulate
from core.skeleton import new_plugin

_CONFIG = click.option(
    "--config", type=click.Path(dir_okay=False), help="headrace.toml; default: $HEADRACE_CONFIG, then the file in this folder."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="headrace")
def main() -> None:
    """A proxy between reinforcement-learning trainers and a fleet of vLLM workers."""


main.add_command(simulate)
main.add_command(new_plugin)
main.add_command(fleet)
main.add_command(update)
main.add_command(route)


@main.command()
@_CONFIG
@click.option("--host", help="Where to listen; default: [server] host.")
@click.option("--port", type=click.IntRange(0, 65535), help="0 takes a free port; default: [server] port.")
def serve(config: str | None, host: str | None, port: int | None) -> None:
    """Serve the fleet that the settings describe; a stand-in worker when they describe none.

    The first SIGTERM or SIGINT lets calls in flight finish, for [server] shutdown_timeout seconds; the second ends them.
    """
    settings, registry = _load(config)
    server = settings.server
    server = replace(server, host=server.host if host is None else host, port=server.port if port is None else port)
    settings = replace(settings, server=server)
    options = ServeOptions(host=server.host, port=server.port, shutdown_timeout=server.shutdown_timeout, stall_timeout=server.stall_timeout)
    sys.exit(run_server(partial(open_asgi, settings, registry), options))


@main.command()
@_CONFIG
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def plugins(config: str | None, as_json: bool) -> None:
    """List the plugins that are loaded: from which distribution, with their hooks; then each hook's plugins in call order."""
    _, registry = _load(config)
    described = registry.describe()
    if as_json:
        click.echo(json.dumps(described, indent=2))
        return
    for plugin in described["plugins"]:
        click.echo(f"{plugin['name']:<20} {plugin['distribution']} {plugin['version']:<12} {', '.join(plugin['hooks'])}")
    click.echo()
    for hook, order in described["hooks"].items():
        click.echo(f"{hook:<20} {' → '.join(order)}")


def _load(config: str | None) -> tuple[Settings, Registry]:
    try:
        settings = load_settings(config)
        return settings, load_plugins(settings)
    except SettingsError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
