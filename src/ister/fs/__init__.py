"""The seam to the file system: a small Protocol, the machine's file system, and one in memory."""
