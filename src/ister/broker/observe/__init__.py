"""What operators see of a broker.

http            the HTTP port
api             the JSON API
cluster_api     the part of it that is about the cluster
topic_api       the part that changes topics and subscriptions, and publishes messages
dead_letter_api the part of it that is about dead letters
requests        reads paths and bodies of its requests
dashboard       the pages
health          the checks of `/ready` and `/health`
probe           probes of the metadata store, the disk and the machine
prometheus      the text of `/metrics`
counters        what is counted while messages pass
rates           messages per second, over the last minutes
rate_file       the same over the last hour and day, in a file
views           descriptions of topics, brokers and the pipeline
cluster_view    descriptions of the cluster: brokers, load, moves, topics that wait
other_brokers   asks other brokers to describe their topics
subscriptions   descriptions of subscriptions
storage_counts  counts each topic's files and objects
totals          these counts for all topics
browse          messages for people, decoded where possible
query_threads   threads for all of this, apart from those that serve messages
"""
