"""Which routes are relayed."""

import re

import pytest

from core.loading import load_plugins
from core.routes import Routes
from core.settings import SettingsError, parse_settings
from plugins.openai_relay import ROUTES, OpenAIRelay, Settings


def served(settings: Settings) -> set[tuple[str, str]]:
    routes = Routes(max_body_bytes=1)
    OpenAIRelay(settings).register_routes(routes, None)  # pyright: ignore[reportArgumentType] - it is for later
    return set(routes._streamed)


def test_it_relays_openais_routes_by_default():
    assert served(Settings()) == {("POST", path) for path in ROUTES}


def test_the_routes_can_be_chosen():
    assert served(Settings(routes=("/score",))) == {("POST", "/score")}


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ('["v1/completions"]', "'v1/completions' is not a path"),
        ('["/a?b"]', "is not a path"),
        ('["/models/<name>"]', "is not a path"),
        ('["/a", "/a"]', "a path is there twice"),
        ('"/a"', "plugins.openai-relay.routes: Expected `array`, got `str`"),
    ],
)
def test_a_wrong_route_is_refused_at_the_start(routes, message):
    settings = parse_settings(f"[plugins.openai-relay]\nroutes = {routes}")
    with pytest.raises(SettingsError, match=re.escape(message)):
        load_plugins(settings)
