"""The benchmarks: each answers one question, with a control and a floor in the same run."""
