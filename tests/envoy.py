"""Envoy, of the environment of `make setup-engines`, in front of servers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from tools import serve_env

_PROGRAM: Final = serve_env.FOLDER / "bin" / "envoy"
_TYPES: Final = "type.googleapis.com/envoy.extensions.filters"
_CONFIG: Final = """
static_resources:
  listeners:
  - address: {{pipe: {{path: {path}}}}}
    filter_chains:
    - filters:
      - name: http
        typed_config:
          "@type": {types}.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: front
          delayed_close_timeout: 0.01s
          upgrade_configs: [{{upgrade_type: websocket}}]
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: {{prefix: /}}
                route:
                  cluster: servers
                  timeout: 3s
                  hash_policy: [{{header: {{header_name: x-session-id}}}}]
          http_filters:
          - name: router
            typed_config: {{"@type": {types}.http.router.v3.Router}}
  clusters:
  - name: servers
    lb_policy: {policy}
    load_assignment:
      cluster_name: servers
      endpoints: [{{lb_endpoints: [{servers}]}}]
"""


def configured(folder: Path, path: Path, hosts: Sequence[str], policy: str) -> list[str]:
    """Write Envoy's configuration; return the command that runs it.

    Envoy hashes the header `x-session-id` if the policy is one that hashes. It passes WebSockets
    on, and reuses connections to servers. It buffers the body of a request for a WebSocket until
    the server accepts the upgrade; where that one waits for the body, Envoy answers 504 after three
    seconds.

    Args:
        folder: Gets the configuration.
        path: Socket on which it listens.
        hosts: Servers, as `address:port`.
        policy: `RING_HASH`, `MAGLEV` or another one of a cluster.
    """
    if not _PROGRAM.exists():
        pytest.skip("no environment for Envoy: make setup-engines")
    servers = ", ".join(map(_endpoint, hosts))
    file = folder / "envoy.yaml"
    file.write_text(_CONFIG.format(path=path, types=_TYPES, policy=policy, servers=servers))
    # Without hot restarts, several Envoys may run on a machine, and leave nothing in /dev/shm.
    program = [str(_PROGRAM), "--disable-hot-restart"]
    return [*program, "--concurrency", "1", "--config-path", str(file)]


def _endpoint(host: str) -> str:
    address, _, port = host.rpartition(":")
    socket = f"{{address: {address}, port_value: {port}}}"
    return f"{{endpoint: {{address: {{socket_address: {socket}}}}}}}"
