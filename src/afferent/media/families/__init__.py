"""Families of models, one file each; `afferent.media.families.registry` lists them."""
