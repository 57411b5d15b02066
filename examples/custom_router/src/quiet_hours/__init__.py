"""Quiet hours: long prompts wait for the night shift's machine."""

from collections.abc import Sequence

from core import Call, Choice, PluginSettings, Worker, hookimpl


class Settings(PluginSettings, frozen=True):
    worker: str = "night"  #: id of the worker for long prompts
    longer_than: int = 16_000  #: tokens


class QuietHours:
    settings_type = Settings

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @hookimpl
    def choose_worker(self, call: Call, workers: Sequence[Worker]) -> Choice | None:
        if len(call.token_ids) <= self._settings.longer_than:
            return None  # the next policy decides
        night = next((w for w in workers if w.id == self._settings.worker), None)
        return night and Choice(night, f"quiet-hours: {len(call.token_ids)} tokens")
