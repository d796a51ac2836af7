"""The way of a request, whichever API it came by: media to handles, messages to tokens."""
