"""A Spark Declarative Pipeline from a topic to tables and to another topic.

Publishes a hundred orders, makes a copy of the pipeline in a directory, lets `spark-pipelines` run
it there, and prints what has become of the orders. With the same directory again, the pipeline
reads only what is new.

    python examples/pipeline/run.py [DIRECTORY]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory

import pyarrow.parquet as pq

import ister

HERE = Path(__file__).parent
SPARK_PIPELINES = Path(sys.executable).with_name("spark-pipelines")


def publish(directory: Path) -> None:
    """A hundred orders after those that are there."""
    with ister.open(directory / "data") as log:
        topic = log.topic("/default/orders", create=True)
        first = topic.watermarks.next
        for number in range(first, first + 100):
            order = {"shop": ("eu-1", "eu-2", "us-1")[number % 3], "amount": number % 39 + 0.25}
            topic.append(json.dumps(order).encode())


def copy_pipeline(directory: Path) -> None:
    """Spark wants absolute paths in a spec, so it is filled in here."""
    spec = Template((HERE / "spark-pipeline.yml").read_text())
    (directory / "spark-pipeline.yml").write_text(spec.substitute(directory=directory))
    shutil.copytree(HERE / "transformations", directory / "transformations", dirs_exist_ok=True)


def run_pipeline(directory: Path) -> None:
    """The same as `spark-pipelines run ...` by hand in that directory."""
    # Without a catalog that outlives it, the second run would not know the tables of the first.
    # This one is a database in the current directory.
    command = [SPARK_PIPELINES, "run", "--conf", "spark.sql.catalogImplementation=hive"]
    # Hive would leave an empty folder in the system's temporary directory at each run.
    resources = f"spark.hadoop.hive.downloaded.resources.dir={directory / 'hive'}"
    command += ["--conf", resources]
    # Spark starts `python3` otherwise, which may be another one.
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    subprocess.run(command, cwd=directory, env=environment, check=True)


def show(directory: Path) -> None:
    """What the pipeline has made: a table of Parquet files, and a topic."""
    table = pq.read_table(directory / "spark-warehouse" / "revenue").sort_by("shop")
    print("The table `revenue`:")
    for row in table.to_pylist():
        print(f"    {row['shop']}  {row['orders']} orders  {row['revenue']}")
    with ister.open(directory / "data") as log:
        large = [json.loads(message.payload) for message in log.topic("/default/large").read()]
    different = {order["offset"] for order in large}
    print(f"The topic /default/large: {len(large)} messages of {len(different)} orders, such as")
    for order in large[:3]:
        print(f"    {order}")


def main() -> None:
    """Runs the example."""
    parser = argparse.ArgumentParser(description="A Spark Declarative Pipeline over topics.")
    parser.add_argument("directory", nargs="?", help="for all data; a temporary one by default")
    arguments = parser.parse_args()
    with TemporaryDirectory() as temporary:
        directory = Path(arguments.directory or temporary).resolve()
        publish(directory)
        copy_pipeline(directory)
        run_pipeline(directory)
        show(directory)


if __name__ == "__main__":
    main()
