"""Stand-in: a worker of our own that keeps vLLM's contract without a model.

When no worker is configured, headrace has somebody to speak to: one process with vLLM's two wires (gRPC and HTTP), whose tokens are
made up, yet depend on the prompt, the seed, the weights and the adapter. Run one by hand with `python -m plugins.stand_in`.
"""
