"""Baselines of the benchmarks: the same work, done as today's engines do it.

Each way has one file. A baseline is written from published descriptions. Its first comment names
the systems that work in this way, and the costs of these systems that the baseline does not have:
it is to be the best of its kind. Its benchmark names the threads and processes of both sides, and
the side that uses new memory.
"""
