"""Weights over NCCL: vLLM's native protocol as a transport, and a broadcast of our own that works on CPUs, too.

`plugin.py` runs in headrace, `worker.py` in vLLM, `trainer.py` in the training script. They share `rounds.py` and no import of the core:
neither vLLM's environment nor the trainer's has to have what headrace needs.
"""
