"""Clients for servers without TLS, which do not read the system's certificates.

Reading them takes 20 ms of processor time, and `httpx` would do it for each call of ``get``.
"""

from __future__ import annotations

import functools
import ssl

import httpx2 as httpx

NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""It trusts no certificate: an ``https`` URL fails."""

get = functools.partial(httpx.get, verify=NO_CERTIFICATES)
post = functools.partial(httpx.post, verify=NO_CERTIFICATES)
request = functools.partial(httpx.request, verify=NO_CERTIFICATES)
stream = functools.partial(httpx.stream, verify=NO_CERTIFICATES)
Client = functools.partial(httpx.Client, verify=NO_CERTIFICATES)
AsyncClient = functools.partial(httpx.AsyncClient, verify=NO_CERTIFICATES)
