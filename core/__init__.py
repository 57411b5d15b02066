"""headrace: the path of a call, the fleet, and what plugins may use.

A plugin imports from here, and nothing from below but vLLM's own messages (`core.wire.generated`).
"""

from core.call import Call, Identity, Outcome, SamplingParams
from core.errors import BadRequest, CallAborted, CallError, NotFound, NoWorker
from core.fleet.administration import Administration
from core.fleet.cohort import Cohort, Member, instance_of
from core.fleet.control import ControlFailed, WorkerControl
from core.fleet.fleet import Fleet
from core.fleet.transport import WeightTransport, WeightUpdate
from core.fleet.worker import Worker, WorkerInfo
from core.hookspecs import Choice, hookimpl
from core.northbound.asking import who, whom
from core.northbound.models import ModelCard
from core.proxy import Proxy
from core.refusals import refusing
from core.reply import GenerateReply, Output, PromptTokensDetails
from core.routes import Exchange, HTTPReply, HTTPRequest, Method, Routes
from core.routing import ranks_for
from core.serving.server import serve_on_port
from core.settings import PluginSettings, Role, Settings, WorkerSettings
from core.wire.needs import OVER_GRPC, OVER_HTTP, STREAMED_PROMPT_LOGPROBS
from core.wire.transfers import needs_with_transfers

__all__ = [
    "OVER_GRPC",
    "OVER_HTTP",
    "STREAMED_PROMPT_LOGPROBS",
    "Administration",
    "BadRequest",
    "Call",
    "CallAborted",
    "CallError",
    "Choice",
    "Cohort",
    "ControlFailed",
    "Exchange",
    "Fleet",
    "GenerateReply",
    "HTTPReply",
    "HTTPRequest",
    "Identity",
    "Member",
    "Method",
    "ModelCard",
    "NoWorker",
    "NotFound",
    "Outcome",
    "Output",
    "PluginSettings",
    "PromptTokensDetails",
    "Proxy",
    "Role",
    "Routes",
    "SamplingParams",
    "Settings",
    "WeightTransport",
    "WeightUpdate",
    "Worker",
    "WorkerControl",
    "WorkerInfo",
    "WorkerSettings",
    "hookimpl",
    "instance_of",
    "needs_with_transfers",
    "ranks_for",
    "refusing",
    "serve_on_port",
    "who",
    "whom",
]
