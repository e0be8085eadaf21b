"""Registers the data source `ister` with Spark, which looks for modules named `pyspark_*`.

Light on purpose: Spark imports every such module when the first data source is looked up, also in
sessions that never read a topic.
"""

from ister.spark.source import IsterDataSource as DefaultSource

__all__ = ["DefaultSource"]
