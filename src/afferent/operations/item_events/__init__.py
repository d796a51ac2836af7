"""Item events: which media items a server has, for routers and other programs."""
