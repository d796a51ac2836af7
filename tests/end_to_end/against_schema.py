"""Run Schemathesis against a server's own OpenAPI document, with valid and invalid requests.

    python -m tests.end_to_end.against_schema --minutes 60

The run fails in these cases:

- an answer that the document does not describe
- any 5xx except a 503 with ``Retry-After``
- a request that violates the schema and is accepted
- memory growth or the death of a process
- an object that is pinned at the end
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.server import Server, wait_until

ROOT = Path(__file__).parents[2]
SCHEMATHESIS = ROOT / ".venv-schema" / "bin" / "schemathesis"
HOOKS = Path(__file__).with_name("schema_checks.py")
CHECKS = (
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "only_unavailable",
)
MAX_GROWTH_MIB = 200


def main() -> int:
    """Return the status of the run: 0 if nothing was found."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--minutes", type=float, default=5.0, help="how long (5)")
    options.add_argument("--seed", type=int, default=1, help="of what is generated (1)")
    given = options.parse_args()
    if not SCHEMATHESIS.exists():
        sys.exit("Schemathesis is not there: make schema installs it")
    with Server("--arena-nbytes", "64MiB", "--max-body-nbytes", "1MiB") as server:
        before_mib = _memory_mib(server)
        command = [str(SCHEMATHESIS), "run", f"{server.url}/openapi.json", "--continue-on-failure"]
        command += ["--max-time", str(round(given.minutes * 60)), "--seed", str(given.seed)]
        command += ["--checks", ",".join(CHECKS), "--request-timeout", "300", "--workers", "4"]
        command += ["--suppress-health-check", "all", "--no-color"]
        env = {**os.environ, "SCHEMATHESIS_HOOKS": str(HOOKS)}
        status = subprocess.run(command, env=env, check=False).returncode
        wait_until(lambda: server.metrics()["afferent_requests_in_flight"] == 0)
        wait_until(lambda: server.metric("afferent_arena_pinned_bytes") == 0)
        assert server.get("/ready").status_code == 200
        grown_mib = _memory_mib(server) - before_mib
        print(f"private memory of all processes: {before_mib:.0f} MiB, and {grown_mib:+.0f} then")
        deaths = [line for line in server.lines if "has ended" in line]
        print("\n".join(deaths) or "no process has died")
    return status or int(grown_mib > MAX_GROWTH_MIB) or int(bool(deaths))


def _memory_mib(server: Server) -> float:
    return sum(process.memory_full_info().uss for process in server.processes()) / 2**20


if __name__ == "__main__":
    sys.exit(main())
