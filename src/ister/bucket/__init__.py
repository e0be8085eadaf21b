"""Ranges of a topic become objects in a bucket, and are read back. Step 2 of a message.

membership          the lease of this process: one process per node, owner of its topics
members             the entries of brokers: addresses, state, load
claim               becoming a topic's owner
terms               what the bucket remembers of owners, to notice older metadata
trust               whether the metadata store as a whole was rolled back
ownership           what only the owner may do: commit, swap, expire, seal, delete
fence               the leased key that a job's changes require
upload              the upload cycle: plan, make, commit
object_maker        makes one object of a range of frames
footers             reads the footers of shared objects
express             express objects: make, commit, read the footer
express_collection  removes express objects that no topic needs
resort              re-sorts a topic's runs into an object of the topic
egress              the limit on the upload rate
catalog             a topic's record and descriptors, read without owning it
directory           the metadata of many topics at once
names               names in the bucket and in the metadata store
identity            the id of a bucket, compared with the one in the metadata store
listing             the objects of a topic, in whichever folder
history_reader      reads frames back from objects
chunks              fetches a part of an object, for decoding whole chunks
check               whether an object is what its descriptor says
compaction_plan     which objects are worth merging
merge               makes one object of several
retention           which objects expire, and their removal
orphans             objects without a descriptor, and their removal
shared_staging      staged files of several topics, and their removal
writer_files        what a writer's record says: staged files, messages that must not go
topic_manifest      the small object that describes a topic
object_choice       which objects of a bucket make up a topic
cursors             cursors beyond the end of a topic that lost messages
pipeline            the pipeline's keys, lease, requests and status
"""
