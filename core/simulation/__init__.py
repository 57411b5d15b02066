"""`headrace simulate`: a trace replayed against any installed policy, on simulated workers and trio's virtual clock.

Everything between the client and the engine is the production code: plugins, gate, placement, retries, settling.
"""
