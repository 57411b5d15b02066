"""The worker extension of the engines that the tests share: vLLM takes one class, and this one receives weights in every way that we have."""

from plugins.weights_nccl.worker import BroadcastReceiver


class Receivers(BroadcastReceiver):
    """For `--worker-extension-cls`."""
