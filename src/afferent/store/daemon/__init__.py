"""The process that knows where everything is, and how it is started."""
