"""The topics of one broker.

topics          all topics: found, created, opened, moved, deleted
served_topic    one open topic: its producers and its subscriptions
listing         the names of all topics, cached
consumer_ids    the ids of consumers, which stay valid after a restart
broker_records  what the broker itself keeps in the metadata store
time_searches   searches for the first message of a time
tasks           work that continues although its caller was cancelled
"""
