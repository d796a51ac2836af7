"""Compiled resizer; `afferent.media.transforms.resize` works without it, too."""
