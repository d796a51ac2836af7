"""What a server is doing now: one view of it, for the page and for ``afferent top``."""
