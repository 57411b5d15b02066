"""The stand-in's gRPC wire: `vllm.Inference`, `vllm.Control` and `grpc.health.v1.Health` on grpclib's asyncio server."""
