"""Upstream that speaks HTTP: started here or elsewhere, watched, and asked by a client."""
