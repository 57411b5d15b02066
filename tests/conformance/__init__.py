"""One suite, three workers: what vLLM 0.33 does, on the wires and through headrace.

* `over_grpc`: each worker's gRPC, every rpc and every field of proto/*.proto;
* `over_http`: each worker's own generate route and its administration;
* `through_headrace`: the same behaviour as a client of headrace sees it.

The scripted worker has vllm-rs 0.33.0, which is the contract. The stand-in has to agree with it. The engine worker is the real thing at
0.31.0; where that version answers differently the test says how, by its version.
"""
