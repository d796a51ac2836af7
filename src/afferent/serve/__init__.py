"""HTTP frontends: each API translates to one internal request, and its answer back."""
