"""Frames to Arrow record batches and back: how histories reach Spark, DuckDB, Polars and pandas.

    frames of one topic ─── decode.ColumnarDecoder, decode.FrameFeed ─► record batches
    record batches ──────── encode.encode_frames ─────────────────────► frames, in segments
    rows with every field ─ encode.restore_frames ────────────────────► the original frames

`schema` has the columns and their Arrow types, `table` checks the columns of rows to be encoded,
`kernel` has the loops that numba compiles, `loops` their arguments, `layout` the memory that they
fill. With the extra `ister[fast]` the loops run as compiled code, without a Python object per
message and without the interpreter lock; without it they run in Python, slower, with the same
results. Both accept exactly what `ister.format.frame` and `ister.format.message` accept: every
frame is checked by crc and offset, and its body is walked to its end, whatever columns are wanted.

Does not own: where bytes come from, which offsets exist, the size limits of a topic.

Values outside of Arrow's types: a `schema_id` over 2^63-1 and a `schema_version` over 2^31-1 become
the negative number with the same bits, and encoding turns them back. A publish time after the year
9999 becomes the last microsecond of that year.

Invariants: one row per frame, in order, without a gap; a batch refers to no byte of the buffer that
it was decoded from.
"""
