"""The store: one arena for every process, reached by handle."""
