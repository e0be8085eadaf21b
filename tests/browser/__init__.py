"""The dashboard in a real browser. A package, so that its brokers end with its last test."""
