"""Subscriptions: which message goes to which consumer, and the position of a subscription.

delivery       the state machine: events in, instructions out; does no I/O
consumer_set   the consumers: known, attached, silent, stalled
entries        its values: messages, consumers, instructions
offset_queue   the order of sending by offset; exclusive, failover, shared
key_queues     the order of sending with key_shared: a queue for each key
keys           which consumer has a key: a hash ring, and key filters
redelivery     failed messages: delays, attempts, the poison policy
timers         ack timeouts, silent consumers, redelivery delays
policy         the kinds of subscriptions, and the failure policy
floor          which offsets are acknowledged
saved_state    what is stored besides the cursor
progress       when the cursor is written
receipts       the proof of delivery that an acknowledgement carries
store          subscriptions in the metadata store
danube_metadata  subscriptions and topics in the JSON of Danube's metadata

Rules:

- `window` is how many unacknowledged messages one consumer may have. A message that failed counts
  in the window of the consumer that failed it until it is sent again, so that a consumer that
  refuses everything stops only itself;
- events only record what happened; `take` decides what is sent. It sends at the time of the last
  event, or at the one it is given;
- a consumer that leaves is not a failure: what it had is sent again at once, in the order of
  offsets, before anything new;
- attempt `n` of a message is its first after `n - 1` failures;
- the ack timeout of a message begins when the consumer's program can have it, not when it was sent:
  clients prefetch. A client that reports says up to which message its program has received. One
  that does not report is taken to have received the oldest message that it has not answered, and
  all that were sent before a message that it answers. A late answer to an earlier attempt does not
  count for messages sent since;
- a consumer is silent if it does not answer or report for the ack timeout while it has messages
  that its program has not received. Without reports its oldest message fails. With kind shared, if
  another consumer is not stalled, this one becomes stalled: its remaining messages go to others,
  which is not a failure, and it gets one message at a time until it answers. A consumer whose
  program answers at another partition is not silent, for up to `SILENCE_EXTENSIONS_MAX` timeouts;
- a subscription is blocked by a message that failed too often under the policy `block`: no message
  is sent for the first time then. What was sent already may still be acknowledged, and is
  redelivered. With key_shared only that key stops;
- a key that no known consumer takes is passed over, which counts as acknowledged. One that only
  detached consumers take is kept. While no consumer is known, everything is kept.

Bounds: `wanted` asks for no more than `window` messages for each consumer that gets messages, and
as many again to be read ahead; with key_shared four times that, and at least
`KEYED_MESSAGES_MIN`, because messages wait there behind others of their key. If all of these are
for consumers that are slow or away, or behind blocked keys, and another consumer is idle, it asks
for more, up to `KEYED_MESSAGES_MAX` and `KEYS_MAX`: a waiting message takes a few bytes, and a key
some hundred. Beyond that, all keys wait. Acknowledgements of messages that were not read yet make
at most `RANGES_MAX` ranges.
"""
