"""headrace: the path of a call, the fleet, and what plugins may use.

A plugin imports from here, and nothing from below.
"""

from core.call import Call, Identity, Outcome, SamplingParams
from core.errors import BadRequest, CallError, NotFound, NoWorker
from core.fleet.worker import Worker, WorkerInfo
from core.hookspecs import Choice, hookimpl
from core.proxy import Proxy
from core.reply import GenerateReply, Output
from core.routes import HTTPReply, HTTPRequest, Routes
from core.settings import PluginSettings, Settings, WorkerSettings

__all__ = [
    "BadRequest",
    "Call",
    "CallError",
    "Choice",
    "GenerateReply",
    "HTTPReply",
    "HTTPRequest",
    "Identity",
    "NoWorker",
    "NotFound",
    "Outcome",
    "Output",
    "PluginSettings",
    "Proxy",
    "Routes",
    "SamplingParams",
    "Settings",
    "Worker",
    "WorkerInfo",
    "WorkerSettings",
    "hookimpl",
]
