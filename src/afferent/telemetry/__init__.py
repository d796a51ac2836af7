"""What is counted and timed: metrics, their sums over all processes, a request's trace."""
