"""Step 1: bytes become durable. Append, group commit, rotation, recovery, local reads, trim."""
