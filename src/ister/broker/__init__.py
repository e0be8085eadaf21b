"""The broker: topics served over gRPC (Danube's protocol), Arrow Flight and HTTP."""
