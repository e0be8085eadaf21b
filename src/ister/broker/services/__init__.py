"""A module per gRPC service: requests and responses. The logic is in other packages.

producer, consumer, discovery    Danube's protocol for clients
admin           Danube's admin services: brokers, cluster, namespaces, topics
security_admin  roles and bindings
schemas         the schema registry
delivery        messages and acknowledgements in batches, for `ister.client`
ister_admin     what operators do that Danube's protocol has no words for
dead_letters    dead letters: count, show, requeue, drop
dead_letter_queue    what these do
peers           calls between brokers
forwarding      calls about topics of other brokers
"""
