"""Benchmarks: each figure beside the limit measured in the same run; `peers` has other brokers."""
