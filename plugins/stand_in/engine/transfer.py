"""What vLLM's `nccl` weight-transfer backend accepts. Other backends are not known here, and take any object."""

from collections.abc import Mapping
from typing import Any

INIT_REQUIRED = {"rank_offset", "world_size"}
INIT_OPTIONAL = {
    "master_address",
    "master_port",
    "nccl_unique_id_b64",
    "packed",
    "packed_buffer_size_bytes",
    "packed_num_buffers",
}
UPDATE_REQUIRED = {"names", "dtype_names", "shapes"}


def check_init(backend: str, info: Mapping[str, Any]) -> None:
    """Raise ValueError, as vLLM's worker does, when `info` can't start a transfer."""
    if backend != "nccl":
        return
    _check_keys("init_info", info, INIT_REQUIRED, INIT_OPTIONAL)
    by_address = {"master_address", "master_port"} <= info.keys()
    if by_address == ("nccl_unique_id_b64" in info):
        raise ValueError("init_info: give either master_address and master_port, or nccl_unique_id_b64")


def check_update(backend: str, info: Mapping[str, Any]) -> None:
    """Raise ValueError, as vLLM's worker does, when `info` doesn't describe the parameters that are sent."""
    if backend != "nccl":
        return
    _check_keys("update_info", info, UPDATE_REQUIRED, set())
    lengths = {key: len(info[key]) for key in sorted(UPDATE_REQUIRED)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"update_info: the lists must be equally long, got {lengths}")


def _check_keys(what: str, info: Mapping[str, Any], required: set[str], optional: set[str]) -> None:
    if missing := required - info.keys():
        raise ValueError(f"{what}: missing {', '.join(sorted(missing))}")
    if unknown := info.keys() - required - optional:
        raise ValueError(f"{what}: unknown {', '.join(sorted(unknown))}")
