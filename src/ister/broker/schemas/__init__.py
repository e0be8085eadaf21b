"""The schema registry: what payloads look like, how that may change, which topics keep to it."""
