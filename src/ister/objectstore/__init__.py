"""Where history is stored: objects by key, in a bucket or a directory.

base            what an object store has to do
keys            which keys are valid
opendal_store, opendal_writer    S3, GCS, Azure, a directory, through opendal
backends        the settings of a store, in opendal's words
staged_files    complete files on the `fs` backend
slices          parts of objects that are read like objects
measured        reads, counted and timed
store_errors    errors of stores as Ister's own
"""
