"""Benchmarks that state, with each figure, the limit measured in the same run."""
