"""The HTTP frontends: each API is a translation to one internal request, and back."""
