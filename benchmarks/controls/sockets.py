"""ZMQ, with which the processes of vLLM, SGLang and LMDeploy communicate."""

from __future__ import annotations

import importlib
from typing import Any

from afferent.errors import ConfigError


def load_zmq() -> Any:
    """Import pyzmq, which only the baselines need.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        importlib.import_module("zmq.asyncio")
        return importlib.import_module("zmq")
    except ImportError as error:
        raise ConfigError("this benchmark needs pyzmq: pip install '.[bench]'") from error
