"""Beyond one machine: what one node has made, another finds, checked, or does without.

A tier is a store of named values on an engine that operators run already. `protocol` says what it
must do, `registry` finds one by its URL, `sealed` is the form of a value, and `vault` reads and
writes values in that form. `node` is what a server does with it, in a process of its own.
"""
