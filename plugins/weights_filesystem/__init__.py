"""Weights over a file system: the trainer writes a checkpoint, every worker reads it.

`plugin.py` runs in headrace, `trainer.py` in the training script, which doesn't have to have what headrace needs.
"""
