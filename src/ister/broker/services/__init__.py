"""A module per gRPC service: requests in, answers out. What is done is done elsewhere."""
