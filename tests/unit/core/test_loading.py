"""Loading plugins by their entry points: which, with which settings, and what an error says."""

from importlib.metadata import EntryPoint

import pytest

from core import loading
from core.call import Call
from core.hookspecs import Choice, hookimpl
from core.loading import load_plugins
from core.settings import PluginSettings, SettingsError, parse_settings


class _Distribution:
    def __init__(self, name):
        self.name = name
        self.version = "1.2"


class Plain:
    @hookimpl
    def receive_call(self, call: Call) -> None: ...


class Waits(Plain):
    enabled_by_default = False


class Chooses:
    @hookimpl
    def choose_worker(self) -> Choice | None: ...


class Tuned:
    class settings_type(PluginSettings, frozen=True):  # noqa: N801
        size: int = 4

    def __init__(self, settings):
        self.size = settings.size


class Exits:
    def __init__(self) -> None:
        raise SystemExit(2)


class Fails:
    def __init__(self):
        raise ValueError("no GPU here")


def entry(name, attribute, dist="my-dist"):
    return EntryPoint(name, f"{__name__}:{attribute}", "headrace.plugins")._for(_Distribution(dist))  # pyright: ignore


@pytest.fixture
def installed(monkeypatch):
    entries = [entry("plain", "Plain"), entry("waits", "Waits"), entry("tuned", "Tuned"), entry("round-robin", "Chooses")]
    monkeypatch.setattr(loading, "entry_points", lambda group: entries)
    return entries


def names(text=""):
    return {p.name for p in load_plugins(parse_settings(text)).plugins}


def test_every_plugin_is_loaded_that_does_not_wait_for_being_enabled(installed):
    assert names() == {"plain", "tuned", "round-robin"}


def test_a_plugin_that_waits_is_loaded_when_it_is_enabled(installed):
    assert "waits" in names("[plugins]\nenable = ['waits']")


def test_a_disabled_plugin_is_not_even_imported(installed):
    installed.append(entry("broken", "NoSuchThing"))
    assert "broken" not in names("[plugins]\ndisable = ['broken', 'plain']")


def test_a_plugin_knows_its_distribution_and_version(installed):
    [plain] = [p for p in load_plugins(parse_settings("")).plugins if p.name == "plain"]
    assert (plain.distribution, plain.version) == ("my-dist", "1.2")


def test_a_plugin_gets_its_own_section_as_its_settings_type(installed):
    registry = load_plugins(parse_settings("[plugins.tuned]\nsize = 9"))
    [tuned] = [p.plugin for p in registry.plugins if p.name == "tuned"]
    assert isinstance(tuned, Tuned)
    assert tuned.size == 9


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[plugins]\nenable = ['wait']", "plugins.enable: there is no plugin 'wait': did you mean 'waits'?"),
        ("[plugins]\ndisable = ['plane']", "plugins.disable: there is no plugin 'plane': did you mean 'plain'?"),
        ("[plugins.tunned]", "plugins.tunned: there is no plugin 'tunned': did you mean 'tuned'?"),
        ("[plugins.plain]\nx = 1", "plugins.plain: this plugin has no settings"),
        ("[plugins.tuned]\nsiez = 1", "settings: unknown key plugins.tuned.siez: did you mean 'size'?"),
        ("[plugins.tuned]\nsize = 'x'", "settings: plugins.tuned.size: Expected `int`, got `str`"),
        ("[plugins]\ndisable = ['round-robin']", "routing.policies: no loaded plugin 'round-robin' chooses workers: there are none"),
    ],
)
def test_an_error_in_the_plugins_settings_names_key_and_nearest(installed, text, expected):
    with pytest.raises(SettingsError) as raised:
        load_plugins(parse_settings(text))
    assert str(raised.value) == expected


@pytest.mark.parametrize(
    ("attribute", "expected"),
    [
        ("NoSuchThing", "plugin 'broken' of my-dist can't be imported: AttributeError: "),
        ("Fails", "plugin 'broken' of my-dist can't start: ValueError: no GPU here"),
        ("Exits", "plugin 'broken' of my-dist can't start: SystemExit: 2"),
    ],
)
def test_a_plugin_that_cannot_be_made_is_named_with_its_distribution(installed, attribute, expected):
    installed.append(entry("broken", attribute))
    with pytest.raises(SettingsError) as raised:
        load_plugins(parse_settings(""))
    assert str(raised.value).startswith(expected)


def test_one_name_from_two_distributions_is_refused(installed):
    installed.append(entry("plain", "Plain", dist="other-dist"))
    with pytest.raises(SettingsError, match=r"plugin 'plain' comes from my-dist and from other-dist; uninstall one"):
        load_plugins(parse_settings(""))
