"""The workers' own HTTP servers. What vllm-rs 0.33.0 answers is asked of it, and the others have to answer alike, key by key."""
