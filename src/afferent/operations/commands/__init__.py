"""Operator's commands, such as ``afferent store stat``, on a running server or store."""
