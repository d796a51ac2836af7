"""Families of models, one file each; `afferent.preprocess.registry` lists them."""
