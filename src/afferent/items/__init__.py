"""Items of a request: received, keyed, looked up, planned and made."""
