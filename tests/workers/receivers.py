"""The worker extension of the engines that the tests share: vLLM takes one class, and this one has every way for weights to come."""

from plugins.weights_nccl.worker import BroadcastReceiver
from plugins.weights_nixl.worker import NixlPull


class Receivers(BroadcastReceiver, NixlPull):
    """For `--worker-extension-cls`."""
