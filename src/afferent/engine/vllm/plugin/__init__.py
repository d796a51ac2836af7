"""Afferent's half in vLLM's own processes: a plugin, by which stock models read the arena.

It is found by the entry point ``vllm.general_plugins``. Without the store's address in the
environment (``AFFERENT_STORE_PATH``) it does nothing. What it takes hold of in vLLM is listed, and
looked for at each start, in `afferent.engine.vllm.plugin.probe`.
"""
