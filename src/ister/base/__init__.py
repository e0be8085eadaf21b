"""What every other package uses. It imports `ister.errors` and nothing else of Ister.

model           the nouns: topic names, ack levels, watermarks, Danube's message record
limits          every bound, each with its reason
positions       positions in a topic and times: parsing, formatting, lag
partitions      names of partitions, and which one a message goes to
message_filter  selects messages by key, attributes and content
serializers     values of a program to payloads and back
structs         types that msgspec reads JSON as, made safe for threads
clock           the only reader of time
clock_guard     detects steps of the wall clock
retry           the backoff of the whole project, and the loops that use it
threads         starts background threads and records their unexpected exceptions
guarded_lock    locks whose holder must not wait for messages, and the check before each wait
forks           makes objects unusable in a forked child
failpoints      points at which a test may stop a process or raise an error
allocator       settings of the C library's allocator
certificates    certificate files that are reloaded when they change
metrics         every metric, declared once
logs            structured logs
tracing         spans for OpenTelemetry
notebook        HTML for notebooks
extras          errors for optional libraries that are not installed
"""
