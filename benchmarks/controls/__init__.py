"""What benchmarks compare with: the job done the way engines do it today. New controls go here.

One file for each way. A control is written from published descriptions, says in its first comment
which system works so, and what it is spared here that the system is not: it is to be the best of
its kind, never a straw man. Its benchmark says which threads and processes both sides have, and on
which side memory is fresh.
"""
