"""`POST /update_weights {"weight_dir": …}`: a folder, or `null` for weights that come by other ways.

It means a method of Prime-RL's worker extension, whose one argument has another name in each variant of it.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from core import BadRequest, refusing

#: The folder of a step ends so. The step is the policy version, and the salt of the rollouts that begin with it.
_STEP: Final = re.compile(r"step_(\d{1,18})/*$")


class WeightDir(Struct, forbid_unknown_fields=True):
    """The body. `version_uid` comes with some versions of the trainer, and is used by none of the ways that are served here."""

    weight_dir: str | None
    version_uid: None = None


def translate(body: Mapping[str, Any], *, label: bool) -> dict[str, Any] | None:
    """The same as a body of `/collective_rpc`; `None` for one that isn't Prime-RL's. `label` the weights with the folder's step.

    Raises: `BadRequest`.
    """
    if "weight_dir" not in body:
        return None
    with refusing("", WeightDir):
        folder = msgspec.convert(body, WeightDir).weight_dir
    if folder is not None and not folder.strip():
        raise BadRequest("weight_dir: it is the path of a folder, or null", param="weight_dir")
    rpc: dict[str, Any] = {"method": "update_weights_from_path", "args": [folder]}
    if label and folder and (step := _STEP.search(folder)):
        rpc["weight_version"] = step[1]
    return rpc
