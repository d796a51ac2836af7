"""ZMQ, which engines' processes talk through: vLLM's, SGLang's and LMDeploy's."""

from __future__ import annotations

import importlib
from typing import Any

from afferent.errors import ConfigError


def load_zmq() -> Any:
    """Only those who run a control need it.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        importlib.import_module("zmq.asyncio")
        return importlib.import_module("zmq")
    except ImportError as error:
        raise ConfigError("this benchmark needs pyzmq: pip install '.[bench]'") from error
