"""Tier beyond one machine: a node can reuse, verified, the objects that another node made.

A tier is a store of named values on an engine that operators already run. `protocol` defines its
interface, `registry` opens one by its URL, `sealed` is the format of a value, and `vault` reads and
writes values in that format. `main` is a server's tier process.
"""
