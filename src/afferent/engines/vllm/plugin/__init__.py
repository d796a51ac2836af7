"""Plugin for vLLM's own processes, by which stock models read the arena.

vLLM finds it by the entry point ``vllm.general_plugins``. Without the store's address in the
environment (``AFFERENT_STORE_PATH``) it does nothing. `afferent.engines.vllm.plugin.probe` lists
the parts of vLLM that it uses, and checks them at each start.
"""
