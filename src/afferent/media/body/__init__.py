"""Request bodies: media are cut out while the body arrives, and written into the arena."""
