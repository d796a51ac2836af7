"""From the bytes of a file to images, audio and frames. Runs in preprocess workers only."""
