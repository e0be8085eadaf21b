"""Talking to the process that owns a topic: the contract, and a client for it."""
