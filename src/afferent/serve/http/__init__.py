"""HTTP: connections, bodies, keys, events, and the endpoints over them."""
