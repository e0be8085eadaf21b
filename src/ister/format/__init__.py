"""Bytes to values and back, without any I/O."""
