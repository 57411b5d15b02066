"""Plugins that are packages of their own, the example and what `headrace new-plugin` writes: installed, each passes its own tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from core.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_router"


def passes_its_tests(package: Path, site: Path) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(package)]
    subprocess.run(install, check=True, timeout=300)
    tests = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", str(package)]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    ended = subprocess.run(tests, check=False, timeout=300, cwd=package, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "skipped" not in ended.stdout


def test_the_example_passes_its_tests(tmp_path: Path):
    passes_its_tests(EXAMPLE, tmp_path)


def test_the_readme_shows_the_example():
    source = (EXAMPLE / "src" / "quiet_hours" / "__init__.py").read_text()
    assert f"```python\n{source}```" in (EXAMPLE.parents[1] / "README.md").read_text()


def test_a_new_plugin_passes_its_tests_before_anybody_has_changed_it(tmp_path: Path):
    package = tmp_path / "package"
    result = CliRunner().invoke(main, ["new-plugin", "long-word", "--folder", str(package)])
    assert result.exit_code == 0, result.output
    passes_its_tests(package, tmp_path / "site")


def test_a_new_plugin_is_clean_and_formatted(tmp_path: Path):
    package = tmp_path / "package"
    CliRunner().invoke(main, ["new-plugin", "long-word", "--folder", str(package)], catch_exceptions=False)
    for command in (["check", "--select", "E,F,I,UP,B"], ["format", "--check"]):
        subprocess.run([Path(sys.executable).parent / "ruff", *command, "--line-length", "140", "."], check=True, timeout=60, cwd=package)


@pytest.mark.parametrize("name", ["Long", "long_word", "-long", "long-", "9lives", "a b"])
def test_a_name_that_can_not_be_a_plugins_is_refused(name: str):
    result = CliRunner().invoke(main, ["new-plugin", "--", name])
    assert result.exit_code != 0
    assert "a plugin's name is words in lower case" in result.output


@pytest.mark.parametrize("name", ["import", "json", "trio", "core", "session"])
def test_a_name_that_is_taken_is_refused(name: str, tmp_path: Path):
    result = CliRunner().invoke(main, ["new-plugin", name, "--folder", str(tmp_path / "new")])
    assert result.exit_code != 0
    assert "of that name already" in result.output


def test_nothing_is_overwritten(tmp_path: Path):
    (tmp_path / "mine.py").touch()
    result = CliRunner().invoke(main, ["new-plugin", "mine", "--folder", str(tmp_path)])
    assert result.exit_code != 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
