"""Content of a block: trees of tensors, written once and read in place."""
