"""The stand-in's engine: everything that both wires share. It knows neither gRPC nor HTTP."""
