"""One log over all tiers: append, read, retention. Step 3 of a message.

log                 all topics of one data directory
topic               one topic: what programs append to and read from
append              from a caller's message to a frame in the buffer
dedup               producer deduplication by sequence numbers
batches             exactly-once batches of staged rows
cache               the newest messages, in memory
reader              one reader over bucket, local files, cache and live messages
aio                 a topic for asyncio
columns             messages as Arrow record batches
table               ranges as tables of pandas, Polars and DuckDB; topics in notebooks
message             a message as its reader gets it
arguments           checks of payloads and offsets
partitioned         a partitioned topic
time_search         finds an offset by publish time

uploads             when a topic is uploaded, the upload, how far it is behind
express             uploads of topics that share express objects
resorting           re-sorts a topic's runs in express objects
idle_mark           records that the bucket has everything, while a topic is idle
upload_plan         which objects an upload would make
pace                slows uploads down beside a busy producer
bucket_link         a topic's link to the bucket: its owner, checks and repairs of objects
retention           removes local files, objects and garbage of a topic with a bucket
local_trim          runs that without a bucket
background          the threads: lease, uploads, retention
disk                free space: the watermark for appends, and the reserve
memory_guard        bounds the memory of a log without local files
room                the disk guard and the memory guard of one log

opening             opens a topic with a bucket
read_only           the history of a topic that waits for another node's disk
reconcile           compares its local files with the catalog
heads               where local files ended, remembered beside them
stores              object store, metadata store and membership of a log
directories         where the directories of topics are
known_topics        which topics exist
node                the identity of a data directory
node_clock          steps of the node's clock
gauges              the gauges of a log

history             the bucket, read without owning anything
local_tail          local files, read by a process that does not own the topic
describe            the description of a topic, for all outputs
offline             describes topics without opening them
backup              `ister backup`
metadata_trust      `ister metadata check` and `accept`
schema_records      the schema registry's records, and a topic's registered schema
schema_kinds        schema types, compatibility modes, validation policies
pipeline_status     whether a pipeline runs, and its last reports
"""
