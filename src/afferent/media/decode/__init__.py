"""Decoders of files to images, audio and frames. For preprocess workers only."""
