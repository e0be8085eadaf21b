"""Sealed ranges of a topic become objects in a bucket, and are read back from there."""
