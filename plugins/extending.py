"""How a transport asks the worker extension of its own that runs inside vLLM, and what that means by its failures."""

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from core import CallError, ControlFailed, WorkerControl

#: How a rank says that it has done nothing yet.
_NOTHING_DONE: Final = re.compile(r"This rank has the weights that it had")


async def call_extension(control: WorkerControl, extension: str, method: str, kwargs: Mapping[str, Any]) -> None:
    """Call a method of the `extension` (its import path) on every rank of a worker.

    Cancellation: the worker may or may not have done it.
    Raises: `ControlFailed`: 501 when its engine was started without the extension, 400 when a rank failed before it has done anything, and
    the worker's own otherwise.
    """
    try:
        await control.collective_rpc({"method": method, "kwargs": kwargs})
    except ControlFailed as failure:
        if failure.status == HTTPStatus.NOT_FOUND:
            text = f"it has no {method}: start its engine with --worker-extension-cls {extension}"
            raise ControlFailed(failure.worker, failure.operation, CallError(HTTPStatus.NOT_IMPLEMENTED, text)) from failure
        if _NOTHING_DONE.search(failure.reason):
            raise ControlFailed(failure.worker, failure.operation, CallError(HTTPStatus.BAD_REQUEST, failure.reason)) from failure
        raise
