"""The broker: topics served over gRPC (Danube's protocol), Arrow Flight and HTTP.

server        the broker, from its start to its end
rpc           the gRPC ports and their two engines
services      a module per gRPC service: the operations, to which HTTP leads, too
operations    what each operation needs
flight        Arrow Flight: bulk publishing, ranges
publish       from producers to the log: the fast path of SendMessage, checks
topics        the topics that this broker serves
dispatch      from the log to consumers
http          the HTTP port and its API
observe       health, metrics, dashboard, descriptions for people
schemas       the schema registry
security      TLS, authentication, roles, audit
cluster       the brokers that share a metadata store
counters      what is counted while messages pass
tasks         work that continues although its caller was cancelled
followed      a part of the metadata store that is read again when it changes
policies      limits and rates of a topic
"""
