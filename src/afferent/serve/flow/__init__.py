"""Pipeline of a request, for all APIs: media to handles, messages to tokens."""
