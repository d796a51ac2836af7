"""The peers themselves, in environments of their own, and the way of one that has no package.

- `servers`, `render`, `vllm`: vLLM's own servers (``make setup-vllm``).
- `ray_store`, `ray_nodes`: Ray's object store, on one node and between two (``make bench-ray``).
- `lightllm`: LightLLM's batched cache server, which no package has; written from its description.
- `floor`, `load`: the least that a hit can cost, and what asks them all.
"""
