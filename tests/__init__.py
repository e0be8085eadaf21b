"""The tests, and the programs that they start: all are imported from the root, as `tests.…`."""
