"""Requests for a prompt of vLLM, read as vLLM's renderer reads them."""
