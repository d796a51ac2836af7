"""Store: one arena for all processes, addressed by handles."""
