"""The broker: topics served over gRPC (Danube's protocol), Arrow Flight and HTTP.

server        the broker, from its start to its end
rpc           the gRPC ports and their two engines
services      a module per gRPC service: the operations, to which HTTP leads, too
operations    what each operation needs
flight        Arrow Flight: bulk publishing, ranges
publish       from producers to the log: the fast path of SendMessage, checks
topics        the topics that this broker serves
dispatch      from the log to consumers
observe       health, metrics, dashboard, HTTP API
schemas       the schema registry
security      TLS, authentication, roles, audit
cluster       the brokers that share a metadata store
followed      a part of the metadata store that is read again when it changes
policies      limits and rates of a topic
topic_names   an index that finds the partitions of a topic
"""
