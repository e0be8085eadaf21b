"""Real servers on loopback ports, and a proxy that misbehaves in front of them."""
