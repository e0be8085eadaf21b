"""The schema registry: what payloads look like, and how that may change.

registry        subjects with versions, and what topics require
subjects        subjects and versions in the metadata store
cache           the registry in memory, for checking every message
definition      the interface of a parsed schema
definitions     reads a definition of any type, compares two
decoding        payloads as JSON, for browsing
avro, avro_datum, json_schema, json_rules, protobuf, primitives    the types
"""
