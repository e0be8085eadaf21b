"""Bytes ⇄ values, without I/O. docs/FORMAT.md describes the formats.

frame           a message body with offset, length and crc
frame_encoder   many messages as frames
frame_search    the next whole frame behind a damaged one
frame_walk      the whole frames of a file or object, in chunks
message         message bodies in bincode: encoded, decoded, split into parts
bincode         the two bincode encodings
checkpoint      checkpoints of the log and the uploader
gaps            offsets that were given up
sparse_index    the index beside each file
descriptor      what makes an object part of a topic
footer          the end of an object that topics share
express         express objects: runs and footer
archive, archive_writer    Parquet objects
records         records in the metadata store
staged_file     files of rows on their way from Spark to topics: segments and footer
staged_rows     the rows in them
manifest        which segments make up a batch
payloads        rows that have only a payload
crc             crc32
offset_ranges   ranges of offsets: union, difference
scan_kernel     the compiled loops over frames, called by `ister.kernels`
arrow           frames ⇄ Arrow columns
"""
