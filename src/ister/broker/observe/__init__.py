"""What operators see of a broker.

http            the HTTP port
api             the JSON API
dashboard       the pages
health          the checks of `/ready` and `/health`
probe           probes of the metadata store, the disk and the machine
prometheus      the text of `/metrics`
counters        what is counted while messages pass
rates           messages per second, over the last minutes
views           descriptions of topics, brokers and the pipeline
subscriptions   descriptions of subscriptions
holdings        counts each topic's files and objects
totals          these counts for all topics
browse          messages for people, decoded where possible
query_threads   threads for all of this, apart from those that serve messages
"""
