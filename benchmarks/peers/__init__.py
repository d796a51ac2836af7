"""Beside the peers' own servers, in an environment of their own (``make setup-vllm``)."""
