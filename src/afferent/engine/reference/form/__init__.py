"""Which form an answer has: compiled apart, in a process that may fail at it."""
