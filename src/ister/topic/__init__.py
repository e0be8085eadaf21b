"""Step 3: one log over its tiers. Cache, readers, watermarks, the log of all topics."""
