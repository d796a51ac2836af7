"""Transforms of pixels: resizing, tiles, patches, normalization."""
