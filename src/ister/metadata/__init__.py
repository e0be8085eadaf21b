"""The metadata store: topic ownership, object descriptors, cursors and other small values.

base            what a metadata store has to do
checks          what every store refuses
leases          a lease as its holder has it
transact        read, decide, change if nothing else came first
sqlite, sqlite_change, sqlite_file              SQLite, for one machine
etcd, etcd_endpoint, etcd_errors, etcd_tls, etcd_usage      etcd, for several
memory          in memory
"""
