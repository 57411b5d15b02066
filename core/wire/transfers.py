"""What a call needs because of its transfer parameters, and of other JSON that goes through untouched."""

from typing import Any, Final, cast

from core.call import Call
from core.wire.needs import LARGE_INTEGERS, STREAMED_HAND_OVER

#: gRPC's numbers in such JSON are doubles. A worker makes integers of those that are whole, as far as doubles tell these apart (vLLM 0.33).
_MOST: Final = 2**53 - 1
_NEEDS: Final = frozenset({STREAMED_HAND_OVER, *LARGE_INTEGERS.values()})


def needs_with_transfers(call: Call) -> set[str]:
    """The needs of the call with those of its transfer parameters as they are now. For whoever has changed these."""
    values = {
        "kv_transfer_params": call.kv_transfer_params,
        "ec_transfer_params": call.ec_transfer_params,
        "reasoning_parser_kwargs": call.reasoning_parser_kwargs and call.reasoning_parser_kwargs.chat_template_kwargs,
    }
    needs = (call.needs - _NEEDS) | {LARGE_INTEGERS[field] for field, value in values.items() if value and _has_large_integers(value)}
    if call.stream and call.kv_transfer_params and call.kv_transfer_params.get("do_remote_decode"):
        needs.add(STREAMED_HAND_OVER)
    return needs


def _has_large_integers(value: Any) -> bool:
    waiting: list[Any] = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, int):
            if abs(value) > _MOST:
                return True
        elif isinstance(value, dict):
            waiting += cast("dict[str, Any]", value).values()
        elif isinstance(value, list):
            waiting += cast("list[Any]", value)
    return False
