"""A real REST catalog of Iceberg: the server that the Apache project tests its own clients with.

Its jars (19 MB) come by Maven, which keeps them for the next run; Hadoop's come with PySpark.
Tables and their metadata are files below a directory, so the server can be killed and started
again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Self
from urllib.error import URLError

import pyspark

from tests.servers.ports import free_port

_ICEBERG, _JETTY, _PLUGIN = "1.10.1", "11.0.26", "3.6.1"
_SERVER = "org.apache.iceberg.rest.RESTCatalogServer"
_STARTS_WITHIN = 120.0
_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>ister.tests</groupId><artifactId>iceberg-rest</artifactId><version>1</version>
  <packaging>pom</packaging>
  <dependencies>{dependencies}</dependencies>
</project>"""
_ARTIFACTS = (
    ("org.apache.iceberg", "iceberg-core", _ICEBERG, ""),
    ("org.apache.iceberg", "iceberg-core", _ICEBERG, "tests"),
    ("org.apache.iceberg", "iceberg-open-api", _ICEBERG, "test-fixtures"),
    ("org.eclipse.jetty", "jetty-servlet", _JETTY, ""),
)
# The classifier `test-fixtures` would bring the clients of all clouds.
_NOTHING_ELSE = (
    "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
)


def fetch_jars(directory: Path) -> str | None:
    """Puts the server's jars into a directory; why it cannot, or None."""
    for program in ("java", "mvn"):
        if shutil.which(program) is None:
            return f"the REST catalog needs {program}"
    dependencies = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId>"
        f"<version>{version}</version>"
        + (f"<classifier>{classifier}</classifier>" if classifier else "")
        + (_NOTHING_ELSE if name == "iceberg-open-api" else "")
        + "</dependency>"
        for group, name, version, classifier in _ARTIFACTS
    )
    directory.mkdir(parents=True, exist_ok=True)
    pom = directory / "pom.xml"
    pom.write_text(_POM.format(dependencies=dependencies))
    goal = f"org.apache.maven.plugins:maven-dependency-plugin:{_PLUGIN}:copy-dependencies"
    done = subprocess.run(
        ["mvn", "-q", "-B", "-f", str(pom), goal, f"-DoutputDirectory={directory}"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        return f"Maven did not get the REST catalog: {done.stdout.strip()[:300]}"
    return None


class IcebergRestServer:
    """The server, and the warehouse that it keeps. A context manager."""

    def __init__(self, jars: Path, warehouse: Path) -> None:
        self._jars = jars
        self._warehouse = warehouse
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def url(self) -> str:
        """For the catalog property `uri`."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Returns when it answers."""
        hadoop = Path(pyspark.__file__).parent.glob("jars/hadoop-client-*.jar")
        classes = os.pathsep.join([f"{self._jars}/*", *map(str, hadoop)])
        self._warehouse.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            ["java", "-Xmx256m", "-XX:+UseSerialGC", "-cp", classes, _SERVER],
            env={
                **os.environ,
                "CATALOG_CATALOG__IMPL": "org.apache.iceberg.hadoop.HadoopCatalog",
                "CATALOG_WAREHOUSE": self._warehouse.as_uri(),
                "CATALOG_REST_PORT": str(self.port),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        ends_at = time.monotonic() + _STARTS_WITHIN
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/v1/config", timeout=5):
                    return
            except (URLError, OSError):
                assert self._process.poll() is None, "the REST catalog has ended"
                assert time.monotonic() < ends_at, "the REST catalog does not answer"
                time.sleep(0.1)

    def kill(self) -> None:
        """Ends it as a failing machine does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
