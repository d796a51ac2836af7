"""Engine in a process of its own: frontends reach it over a socket."""
