"""Arrow Flight: bulk publishing, ranges and what is known of topics, as the contract says.

    service ─► reads      do_get, and what clients ask about a topic
          └──► publish    do_put
               ipc        columns in and out of Flight's messages
               broker_source   the topics, callers and their permissions
               failures   errors on their way to the client

The messages are those of `ister.wire.contract`. The service is one of the broker's gRPC server,
and stands behind its guard and limits. It needs pyarrow: nothing outside of this package imports
from it unless it serves.
"""
