"""How many requests may be at something at a time, whoever they are. Pure."""
