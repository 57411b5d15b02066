"""What every worker extension of ours has to know of vLLM's way to load weights into a model that runs. Needs vLLM."""

# pyright: reportMissingImports=false
# What is missing from this project's environment is in vLLM's.

from typing import Any


def forget_reload(worker: Any) -> None:
    """End a reload of vLLM's `worker` that broke off: layers that were not complete have the weights again that they had before.

    vLLM 0.31 keeps what such a layer has got until the next reload, which then fails in the same way, or takes it for a part of its own.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    model = worker.model_runner.get_model()
    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.loaded_weights.clear()
        info.load_numel = 0
    finalize_layerwise_reload(model, worker.model_config)
