"""An engine for `vllm-rs` that follows a script: the real server's exact behaviour, without a model.

It speaks vLLM 0.33's ZMQ protocol, with pyzmq and msgspec alone. What a request does is decided by its first prompt token
(`behaviour.py`), what it says by `tokens.py`, what the engine answers to administrative calls by `administration.py`. Everything
that reaches it can be logged, so that tests can assert it.
"""

from tests.workers.scripted_engine.behaviour import Behaviour

__all__ = ["Behaviour"]
