"""The stand-in's HTTP wire: what vllm-rs 0.33.0 serves over HTTP, as far as it makes sense without a model."""
