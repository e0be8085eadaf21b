"""Tables that topics are exported to: Parquet directories, Iceberg tables, Delta tables.

    rows ─► typed or envelope columns ─► data files, written by tasks ─► one commit: files + ranges

A table's own commit says which offsets of which topics it has, and refuses those that it has
already: that is what makes an export exactly once, whoever is killed, paused or replaced when.
"""
