"""Who calls the broker, what they may do, and how the wire is kept private.

tls             certificates of the three ports, read again when they change
authentication  from headers and client certificates to a principal
principal       who calls: a name, a kind, and until when
api_keys        the file of API keys
access          roles and bindings: what a principal may do
rights          permissions, roles and bindings as values
audit           what was refused and what was changed, for later
guard           the four of them as the services see them
grpc_guard, http_guard    a guard in front of every call of a transport
principal_limits  limits per principal: subscriptions, consumers, streams
cluster_secret  the secret by which brokers of one cluster authenticate each other
minting         new API keys and tokens
"""
