"""What operators see of a broker.

dashboard       the pages
health          the checks of `/ready` and `/health`
probe           probes of the metadata store, the disk and the machine
prometheus      the text of `/metrics`
rates           messages per second, over the last minutes, hour and day
views           descriptions of topics, brokers and the pipeline
cluster_view    descriptions of the cluster: brokers, load, moves, topics that wait
other_brokers   asks other brokers to describe their topics
subscriptions   descriptions of subscriptions
storage_counts  counts each topic's files and objects
totals          these counts for all topics
browse          messages for people, decoded where possible
query_threads   threads for all of this, apart from those that serve messages
"""
