"""The seam to the file system: a small Protocol, the real one, and one that crashes on demand."""
