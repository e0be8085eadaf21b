"""Arrow Flight: bulk publishing, ranges and what is known of topics, as the contract says.

    server ─► reads      do_get, and what clients ask about a topic
         └──► publish    do_put
              source     where the topics come from, who may have them
              failures   errors on their way to the client

The messages are those of `ister.client.contract`. Everything here runs on threads of gRPC, and
needs pyarrow: nothing outside of this package imports from it unless it serves.
"""
