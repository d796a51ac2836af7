"""The private parts of `uvicorn` that connections reach into are as they were when we read them.

`afferent.serve.http.connection` and `disconnects` override some, and read and set others. Where one
of these tests fails, `uvicorn` has changed: compare its sources with those two modules, run
`tests/serve/test_connection.py`, and only then write the new digest, and the new version in
`pyproject.toml`.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http import flow_control
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

OVERRIDDEN = {
    HttpToolsProtocol: (
        "__init__ connection_made connection_lost data_received on_message_begin on_url on_header "
        "on_headers_complete on_body on_message_complete on_response_complete _start_asgi_task "
        "send_400_response"
    ),
    FlowControl: "__init__ pause_reading pause_writing resume_writing",
    uvicorn.Server: "main_loop on_tick handle_exit startup shutdown",
}
ATTRIBUTES = {
    HttpToolsProtocol: "transport flow headers parser pipeline cycle",
    FlowControl: "_transport read_paused",
    RequestResponseCycle: "disconnected response_complete body",
}
DIGESTS = {
    HttpToolsProtocol: "18fdf324b11bf160",
    FlowControl: "126debcdaa894c83",
    RequestResponseCycle: "e67d470d435dcc1c",
}


@pytest.mark.parametrize("cls", OVERRIDDEN, ids=lambda cls: cls.__name__)
def test_what_we_override_is_there(cls: type[Any]) -> None:
    missing = [name for name in OVERRIDDEN[cls].split() if name not in vars(cls)]
    assert not missing, f"uvicorn's {cls.__name__} lost what we override"


@pytest.mark.parametrize("cls", ATTRIBUTES, ids=lambda cls: cls.__name__)
def test_what_we_read_and_set_is_there(cls: type[Any]) -> None:
    made = set(re.findall(r"self\.(\w+)(?:: [^=\n]+)? = ", inspect.getsource(cls.__init__)))
    missing = set(ATTRIBUTES[cls].split()) - made
    assert not missing, f"uvicorn's {cls.__name__} lost what we read and set"


def test_its_buffer_is_as_large_as_it_was() -> None:
    assert flow_control.HIGH_WATER_LIMIT == 65536


@pytest.mark.parametrize("cls", DIGESTS, ids=lambda cls: cls.__name__)
def test_what_it_does_is_what_we_read(cls: type[Any]) -> None:
    digest = hashlib.sha256(inspect.getsource(cls).encode()).hexdigest()[:16]
    assert digest == DIGESTS[cls], f"uvicorn's {cls.__name__} has changed: see above what to do"
