"""Rollouts as Prime-RL's environment servers make them; runs inside an environment with the packages `verifiers` and `renderers`.

`python prime_rollouts.py` reads an order, a JSON object, from standard input, and writes what came of it to standard output:

* `url`, `model`: the endpoint with `/v1` at its end, and the model's name;
* `tokenizer`: a folder with the tiny model's tokenizer;
* `rollouts`: for each one the `sampling` configuration and the `turns`, what the user says. All of them run at once;
* `evaluations`: the same with one turn each; they go over the chat route, in text.

Each rollout has a trace's id as its session. Its turns go through the packages' own client, renderer and message graph, and from the
second one on they're bridged: the prompt begins with the very tokens that were sampled before.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# What is missing from this project's environment is in the other one, in either of two versions.

import asyncio
import json
import os
import sys
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from openai import APIStatusError
from renderers import create_renderer
from renderers.configs import Qwen3RendererConfig
from transformers import AutoTokenizer
from verifiers.v1 import graph
from verifiers.v1.clients import EvalClientConfig, TrainClientConfig, resolve_client
from verifiers.v1.clients.train import ElasticRendererPool, RendererSlot
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.trace import Trace
from verifiers.v1.types import SamplingConfig, UserMessage

#: Qwen3's renderer wants to know their ids. They're beyond the tiny model's vocabulary, and no rollout here holds one.
_UNUSED = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


async def roll_out(client: Any, model: str, sampling: dict[str, Any], turns: list[str]) -> dict[str, Any]:
    """One rollout: its session, for each turn what was sent and sampled, and for each branch its tokens and their routed experts."""
    trace = Trace.model_construct(nodes=[])
    prompt: list[Any] = []
    told: list[dict[str, Any]] = []
    for text in turns:
        prompt.append(UserMessage(content=text))
        turn = graph.prepare_turn(trace, list(prompt))
        body = {"model": model, "messages": [{"role": "user", "content": text}]}
        try:
            response = await client.get_response(ChatDialect(), body, SamplingConfig(**sampling), session_id=trace.id, turn=turn)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test judges it
            told.append({"error": f"{type(error).__name__}: {error}", "status": _status(error)})
            break
        turn.commit(response)
        prompt.append(response.message)
        tokens = response.tokens
        told.append(
            {
                "prompt": list(tokens.prompt_ids),
                "completion": list(tokens.completion_ids),
                "logprobs": list(tokens.completion_logprobs),
                "finish": response.finish_reason,
                "bridged": turn.tail_start > 0,
            }
        )
    branches = [] if "error" in told[-1] else trace.branches
    routed = [branch.routed_experts for branch in branches]
    return {
        "session": trace.id,
        "turns": told,
        "branches": [list(branch.token_ids) for branch in branches],
        "routed": [None if rows is None else rows.tolist() for rows in routed],
    }


async def evaluate(client: Any, model: str, sampling: dict[str, Any], turns: list[str]) -> dict[str, Any]:
    """One evaluation: its end, and how many tokens it took."""
    configured = SamplingConfig(**sampling)
    chat = {"messages": [{"role": "user", "content": text} for text in turns]}
    body = ChatDialect().apply_overrides(chat, model, configured)
    response = await client.get_response(ChatDialect(), body, configured, session_id="evaluation")
    return {"finish": response.finish_reason, "prompt": response.usage.prompt_tokens, "completion": response.usage.completion_tokens}


def _status(error: BaseException | None) -> int | None:
    """The HTTP status behind an error, wherever this version of the packages keeps it."""
    while error is not None:
        if isinstance(error, APIStatusError) or hasattr(error, "status_code"):
            return error.status_code
        error = error.__cause__
    return None


def _prepare_renderer(model: str, folder: str) -> None:
    """Put a renderer for the tiny model where the client looks for one, since none of the hub's models is it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": _UNUSED})
    renderer = create_renderer(tokenizer, Qwen3RendererConfig(thinking_retention="all"))
    ElasticRendererPool._renderers[(model, None, None)] = [RendererSlot(renderer)]


async def main() -> None:
    """Do what standard input says."""
    order = json.load(sys.stdin)
    _prepare_renderer(order["model"], order["tokenizer"])
    where = {"base_url": order["url"], "api_key_var": "NONE"}
    told: dict[str, Any] = {}
    for kind, make, config in (
        ("rollouts", roll_out, TrainClientConfig(**where, renderer_model_name=order["model"])),
        ("evaluations", evaluate, EvalClientConfig(**where)),
    ):
        client = resolve_client(config)
        told[kind] = await asyncio.gather(*(make(client, order["model"], each["sampling"], each["turns"]) for each in order.get(kind, ())))
        await client.close()
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
