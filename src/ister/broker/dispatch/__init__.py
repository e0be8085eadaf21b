"""From the log to consumers: one `Dispatcher` per reliable subscription, one `Fanout` per other.

dispatcher      a reliable subscription: runs the delivery state machine, keeps the cursor
prefetch        reads messages ahead, holds them in memory, reads some again
cursor_writer   writes the cursor to the metadata store, now and then
outbox          what is on its way to one consumer
encoder         stored bodies as the messages that Danube's clients get
consumer_ids    the ids of consumers, which stay valid after a restart
dead_letters    messages that failed too often, as the dead-letter topic gets them
frame_sizes     the sizes of frames that may have to be read again
fanout          a subscription of a topic without a log: messages are pushed or dropped
memory_budget   the memory of all of them
write_queue     which streams may write, within that memory
"""
