"""`headrace new-plugin NAME`: a package of its own with a plugin that works, its settings, and its tests."""

import keyword
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Final

import click

from core.loading import GROUP

#: As entry points and distributions are named.
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
#: Where each file of the template goes.
_PLACES: Final[Mapping[str, str]] = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "plugin.py": "src/${module}/__init__.py",
    "conftest.py": "tests/conftest.py",
    "test_plugin.py": "tests/test_${module}.py",
}


@click.command("new-plugin")
@click.argument("name")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Where to write it; default: ./headrace-NAME.")
def new_plugin(name: str, folder: Path | None) -> None:
    """Write the package of a new plugin: one that works, with settings, a metric and tests, for you to change."""
    if not _NAME.fullmatch(name):
        raise click.UsageError(f"{name!r}: a plugin's name is words in lower case, joined by single hyphens: quiet-hours")
    module = name.replace("-", "_")
    if keyword.iskeyword(module) or find_spec(module):
        raise click.UsageError(f"{name!r}: Python has something of that name already; take another one")
    if name in entry_points(group=GROUP).names:
        raise click.UsageError(f"{name!r}: there is a plugin of that name already (headrace plugins); take another one")
    target = folder or Path(f"headrace-{name}")
    if target.exists() and any(target.iterdir()):
        raise click.ClickException(f"{target}: there is something already")
    for path, text in _written(name):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(text, encoding="utf-8")
    click.echo(f"{target}: now pip install -e '{target}[test]', and pytest {target}")


def _written(name: str) -> Iterator[tuple[str, str]]:
    words = name.split("-")
    known = {"name": name, "module": "_".join(words), "class": "".join(word.capitalize() for word in words)}
    for source, place in _PLACES.items():
        template = files("core.skeleton").joinpath("template", f"{source}.in").read_text(encoding="utf-8")
        yield Template(place).substitute(known), Template(template).substitute(known)
