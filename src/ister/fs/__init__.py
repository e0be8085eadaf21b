"""The seam to the file system: a small Protocol and its implementation."""
