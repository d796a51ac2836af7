"""HTTP/1.1 server for ASGI applications, with its own strict parser.

It reads requests as RFC 9112 defines them and refuses every request that a proxy in front of it
could frame in another way. It knows nothing of the application that it serves.
"""
