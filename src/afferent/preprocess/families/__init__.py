"""One file for each family of models; `afferent.preprocess.registry` lists them."""
