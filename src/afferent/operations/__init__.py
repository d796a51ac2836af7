"""Operation of a server: the supervisor, the commands and the live page."""
