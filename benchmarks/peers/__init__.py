"""The peers themselves, in their own environments, and a model of one that has no package.

- `servers`, `render`, `vllm`: vLLM's own servers (``make setup-vllm``).
- `ray_store`, `ray_nodes`: Ray's object store, on one node and between two (``make bench-ray``).
- `lightllm`: LightLLM's batched cache server, which has no package; written from its description.
- `floor`, `load`: the minimal cost of a hit, and the clients of all of them.
"""
