"""What headrace costs, measured against a real `vllm-rs` server, and beside its peers: see README.md."""
