"""A process that does nothing until it is killed."""

import signal

if __name__ == "__main__":
    signal.pause()
