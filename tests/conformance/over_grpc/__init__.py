"""The gRPC contract, one behaviour a module. `client.py` speaks it, `coverage.py` keeps account of rpcs and fields."""
