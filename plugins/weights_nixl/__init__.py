"""Weights over NIXL: workers read them out of the trainer's memory, a GPU's or the main one, with RDMA where there is any.

`plugin.py` is what headrace loads, `worker.py` runs inside vLLM, and `trainer.py` in the trainer. The last two need nothing else of
headrace, so nothing is imported here.
"""
