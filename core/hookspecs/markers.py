"""How specs and implementations of hooks are marked, for pluggy."""

from typing import Final

import pluggy

PROJECT: Final = "headrace"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
