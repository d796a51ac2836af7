"""What every process stands on: starting, talking, logging, the memory there is."""
