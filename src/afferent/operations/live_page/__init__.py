"""Live view of a server, for the page and for ``afferent top``."""
