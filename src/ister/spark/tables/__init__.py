"""Tables that topics are exported to: Parquet directories, Iceberg tables, Delta tables.

    rows ─► typed or envelope columns ─► data files, written by tasks ─► one commit: files + ranges

A table's own commit says which offsets of which topics it has, and refuses those that it has
already: that is what makes an export exactly once, whoever is killed, paused or replaced when.

base                  what an export asks of a table, and what is the same in all formats
opening               which table an export means
parquet_directory     a directory of Parquet files
delta, iceberg        Delta and Iceberg tables, which other libraries keep
columns               the columns of a table
column_ids            which column of an Iceberg table is which of ours
json_schema, json_rows    typed columns of JSON payloads
writing, targets      data files, and where they go
ranges                which offsets a table has
"""
