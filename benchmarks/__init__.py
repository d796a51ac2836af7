"""The benchmarks: each answers one question, with a baseline and a lower bound in the same run.

In the records and in the code, a baseline is a *control*, and a lower bound is a *floor*.
"""
