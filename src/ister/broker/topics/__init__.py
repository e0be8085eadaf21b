"""The topics of one broker.

topics          all topics: partitions, moves, take-overs, deletion
open_topics     finds, creates and opens topics; closes those that another broker has
names           names of topics and namespaces, and their policies
assignee        follows the assignments of the cluster
cluster_control drain, rebalance, move and take over, for operators
served_topic    one open topic: its producers and its subscriptions
listing         the names of all topics, cached
consumer_ids    the ids of consumers, which stay valid after a restart
broker_records  what the broker itself keeps in the metadata store
dead_letter_queue  dead letters: count, show, requeue, drop
time_searches   searches for the first message of a time
tasks           work that continues although its caller was cancelled
"""
