"""Loading the plugins that are installed, each with its own section of the settings.

Plugins come by entry points of the group `headrace.plugins`, ours and theirs alike. An entry point names a class. Its attribute
`settings_type` (a `PluginSettings`) makes the constructor take the plugin's own section of the settings, `[plugins.NAME]`; a class
without one takes nothing and has no section. `enabled_by_default = False` makes it wait for `[plugins] enable`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from core.hookcalls import is_end
from core.registry import Loaded, Registry
from core.settings import PluginSettings, PluginsSettings, Settings, SettingsError, convert_settings
from core.wording import nearest

GROUP: Final = "headrace.plugins"


def load_plugins(settings: Settings, *, only: Collection[str] | None = None) -> Registry:
    """Load the plugins that the settings ask for; of these, `only` those, each of which chooses workers.

    Raises: `SettingsError`, which names the distribution when a plugin can't be imported or its settings are wrong.
    """
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        if entry.name in found:
            raise SettingsError(f"plugin {entry.name!r} comes from {_origin(found[entry.name])} and from {_origin(entry)}; uninstall one")
        found[entry.name] = entry
    choice = settings.plugins
    for key, names in (("enable", choice.enable), ("disable", choice.disable), ("", list(choice.sections))):
        for name in names:
            if name not in found:
                raise SettingsError(f"plugins.{key or name}: there is no plugin {name!r}: {nearest(name, list(found))}")
    for name in only or ():
        if name not in found:
            raise SettingsError(f"there is no plugin {name!r}: {nearest(name, list(found))}")
    wanted = found if only is None else {name: entry for name, entry in found.items() if name in only}
    loaded = list(_load_all(wanted, choice))
    for name in only or ():
        _check_policy(name, loaded, found)
    registry = Registry(loaded, settings.routing.policies)
    registry.check(settings.routing)
    registry.enforce(settings.routing.named)
    return registry


def _load_all(found: Mapping[str, EntryPoint], choice: PluginsSettings) -> Iterator[Loaded]:
    for name, entry in found.items():
        if name in choice.disable:
            continue
        distribution = _origin(entry)
        try:
            plugin_type: Any = entry.load()
        except BaseException as error:
            if is_end(error):
                raise
            raise SettingsError(f"plugin {name!r} of {distribution} can't be imported: {type(error).__name__}: {error}") from error
        if not getattr(plugin_type, "enabled_by_default", True) and name not in choice.enable:
            continue
        try:
            plugin = _make(plugin_type, name, choice.sections.get(name))
        except SettingsError:
            raise
        except BaseException as error:
            if is_end(error):
                raise
            raise SettingsError(f"plugin {name!r} of {distribution} can't start: {type(error).__name__}: {error}") from error
        yield Loaded(name, plugin, distribution, entry.dist.version if entry.dist else "?")


def _check_policy(name: str, loaded: Sequence[Loaded], found: Mapping[str, EntryPoint]) -> None:
    plugin = next((each.plugin for each in loaded if each.name == name), None)
    if plugin is None:
        raise SettingsError(f"plugin {name!r} is disabled: take it from plugins.disable, or into plugins.enable")
    if not hasattr(plugin, "choose_worker"):
        policies = [other for other, entry in found.items() if hasattr(entry.load(), "choose_worker")]
        raise SettingsError(f"plugin {name!r} chooses no workers: {nearest(name, policies)}")


def _origin(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else "?"


def _make(plugin_type: Callable[..., object], name: str, section: dict[str, Any] | None) -> object:
    settings_type: type[PluginSettings] | None = getattr(plugin_type, "settings_type", None)
    path = f"plugins.{name}"
    if settings_type:
        return plugin_type(convert_settings(section or {}, settings_type, source="settings", path=path))
    if section:
        raise SettingsError(f"{path}: this plugin has no settings")
    return plugin_type()
