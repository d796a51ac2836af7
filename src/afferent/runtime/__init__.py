"""Base of every process: start, sockets and messages, logs, limits of memory."""
