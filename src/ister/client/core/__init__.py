"""What both clients share: `aio` and `sync` are two faces of these classes.

    producer ─► sender ─► put_stream (Flight do_put)          one sender per topic or partition
    consumer ◄─ receiver (ister.Delivery)                     one receiver per topic or partition
    network                                                   channels, lookup, calls

Everything belongs to one event loop, except what a module says any thread may call.
"""
