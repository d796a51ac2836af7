"""From the bytes of a file to pictures, sound and frames. Runs in preprocess workers only."""
