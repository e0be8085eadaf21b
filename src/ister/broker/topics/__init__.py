"""The topics of one broker.

topics          finds, creates and opens topics; partitions, moves, take-overs, deletion
stand_in        which broker clients are sent to while this one is cut off
names           names of topics and namespaces, and their policies
assignee        follows the assignments of the cluster
cluster_control drain, rebalance, move and take over, for operators
served_topic    one open topic: its producers and its subscriptions
listing         the names of all topics, cached, and their partitions
broker_records  what the broker itself keeps in the metadata store
time_searches   searches for the first message of a time
"""
