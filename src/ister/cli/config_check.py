"""Checks of settings beyond reading them: files and stores.

Owns: the checks of `ister config check`. Does not own: what settings mean (`ister.config`), the
checks of the parts themselves (each is asked for its own), or how findings are shown.

Nothing is made and nothing stays: a directory or a file that does not exist yet is not created, and
the objects by which a bucket is tried are removed again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ister.base.clock import SystemClock
from ister.cli.output import format_bytes
from ister.config import (
    AuthMode,
    CloudBackend,
    Config,
    DiskConfig,
    GrpcEngine,
    MetadataBackend,
    Problem,
    StorageConfig,
    StorageMode,
)
from ister.config.aliases import name_as_given
from ister.errors import IsterError
from ister.objectstore.backends import check_option_names, parse_backend
from ister.topic.disk import min_free_bytes
from ister.topic.stores import open_identity, open_metadata, open_objects


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The result of one check."""

    name: str
    is_ok: bool
    says: str
    hint: str | None = None


# -- problems -------------------------------------------------------------------------------


def find_deeper_problems(config: Config) -> list[Problem]:
    """What a broker with these settings would refuse when it starts, as far as that is known."""
    problems: list[Problem] = []

    def ask(key: str, check: Callable[[], object]) -> None:
        try:
            check()
        except ImportError as error:
            text = f"not checked: {error.name} is not installed"
            hint = "pip install 'ister[broker]'"
            problems.append(Problem(key=key, message=text, hint=hint))
        except IsterError as error:
            name_as_given(error, config.storage.cloud.given_as)
            text = error.message if error.path is None else f"{error.message} ({error.path})"
            problems.append(Problem(key=key, message=text, hint=error.hint))

    storage = config.storage
    if storage.mode.has_bucket:
        cloud = storage.cloud
        ask(
            "storage.cloud",
            lambda: check_option_names(
                parse_backend(cloud.backend.value, cloud.root or "", cloud.options)
            ),
        )
    ask("broker.host", lambda: _check_exposure(config))
    ask("broker.tls", lambda: _check_tls(config))
    ask("broker.auth", lambda: _check_auth(config))
    ask("broker.grpc.engine", lambda: _check_engine(config))
    return problems


def _check_exposure(config: Config) -> None:
    from ister.broker.security.tls import check_exposure  # noqa: PLC0415 - an extra

    check_exposure(config.broker)


def _check_tls(config: Config) -> None:
    from ister.broker.security.tls import ServerTls  # noqa: PLC0415 - an extra

    ServerTls.open(config.broker.tls, clock=SystemClock())


def _check_auth(config: Config) -> None:
    from ister.broker.security.authentication import Authenticator  # noqa: PLC0415 - an extra

    Authenticator(config.broker.auth, clock=SystemClock())


def _check_engine(config: Config) -> None:
    from ister.broker.rpc.native_engine import load_native  # noqa: PLC0415 - an extra
    from ister.broker.rpc.server import choose_engine  # noqa: PLC0415 - an extra

    if choose_engine(config.broker) is GrpcEngine.NATIVE:
        load_native()


# -- places ---------------------------------------------------------------------------------


def describe_places(config: Config) -> dict[str, str]:
    """Where data is stored and where the broker listens, in words."""
    storage, broker = config.storage, config.broker
    ports = broker.ports
    scheme = "https" if broker.tls.cert_file is not None else "http"
    directory = storage.wal.dir
    places = {
        "messages": {
            StorageMode.WAL_CLOUD: "in local files, then in a bucket",
            StorageMode.LOCAL_ONLY: "in local files only",
            StorageMode.MEMORY: "in memory only: lost when the process ends",
            StorageMode.BUCKET: "in a bucket, without local files",
        }[storage.mode]
    }
    if directory is None and storage.mode is StorageMode.LOCAL_ONLY:
        places["messages"] = (
            "in memory only, because storage.wal.dir is not set: lost when the process ends"
        )
    if directory is not None:
        places["local files"] = _describe_path(directory)
    if storage.mode.has_bucket:
        places["bucket"] = _describe_bucket(storage)
        places["metadata"] = _describe_metadata(storage)
    places |= {
        "acknowledged": f"when {storage.ack.value}"
        + ("" if storage.mode is StorageMode.BUCKET else ", unless a topic has its own level"),
        "gRPC": _describe_port(broker.host, ports.grpc),
        "Flight": _describe_port(broker.host, ports.flight),
        "HTTP": f"{scheme}://{_describe_port(broker.host, ports.http)}/",
        "callers": "no authentication: anyone who can connect"
        if broker.auth.mode is AuthMode.NONE
        else "must authenticate",
    }
    return places


def _describe_port(host: str, port: int) -> str:
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{host}:{port}" if port else f"{host}:<any free port>"


def _describe_bucket(storage: StorageConfig) -> str:
    cloud = storage.cloud
    if cloud.backend is CloudBackend.MEMORY:
        return "in memory: lost when the process ends"
    if cloud.backend in (CloudBackend.FS, CloudBackend.LOCAL):
        return _describe_path(cloud.root or "")
    # In opendal's words, which have no credentials.
    return parse_backend(cloud.backend.value, cloud.root or "", cloud.options).location


def _describe_metadata(storage: StorageConfig) -> str:
    metadata = storage.metadata
    if metadata.backend is MetadataBackend.SQLITE:
        return _describe_path(metadata.path or "")
    if metadata.backend is MetadataBackend.ETCD:
        return f"etcd at {', '.join(metadata.endpoints)}, below {metadata.root_prefix}"
    return "in memory: lost when the process ends"


def _describe_path(path: str) -> str:
    path = os.path.abspath(path)
    return path if os.path.exists(path) else f"{path} (does not exist yet)"


# -- connections ----------------------------------------------------------------------------


def try_connections(config: Config) -> Iterator[Connection]:
    """Tries the disk, the bucket and the metadata store, one after the other."""
    storage = config.storage
    if storage.wal.dir is not None:
        yield _try_directory("local files", storage.wal.dir, storage.disk)
    if not storage.mode.has_bucket:
        return
    stores = [_try_bucket(storage), _try_metadata(storage)]
    yield from stores
    is_made = storage.metadata.backend is not MetadataBackend.SQLITE or os.path.exists(
        storage.metadata.path or ""
    )
    if all(store.is_ok for store in stores) and is_made:
        yield _try_identity(storage)


def _try_directory(name: str, path: str, disk: DiskConfig) -> Connection:
    """Whether a directory can be written to, or made where it is missing, and has room."""
    path = os.path.abspath(path)
    at = path
    while not os.path.exists(at):
        at = os.path.dirname(at)
    if not os.path.isdir(at):
        return Connection(name=name, is_ok=False, says=f"{at} is not a directory")
    if not os.access(at, os.W_OK | os.X_OK):
        return Connection(
            name=name,
            is_ok=False,
            says=f"{at} is not writable by this user",
            hint="run as the broker's user, or change the owner",
        )
    usage = shutil.disk_usage(at)
    free, limit = format_bytes(usage.free), min_free_bytes(disk, usage.total)
    if usage.free < limit:
        return Connection(
            name=name,
            is_ok=False,
            says=f"{free} free on the disk of {path}; appends stop below {format_bytes(limit)}",
            hint="free disk space, or lower storage.disk.min_free",
        )
    what = "is writable" if at == path else "will be created on first use"
    return Connection(name=name, is_ok=True, says=f"{path} {what}; {free} free")


def _try_bucket(storage: StorageConfig) -> Connection:
    cloud = storage.cloud
    if cloud.backend is CloudBackend.MEMORY:
        return Connection(name="bucket", is_ok=True, says="in memory: nothing to check")
    if cloud.backend in (CloudBackend.FS, CloudBackend.LOCAL):
        found = _try_directory("bucket", cloud.root or "", storage.disk)
        if not found.is_ok or not os.path.isdir(cloud.root or ""):
            return found
    try:
        store = open_objects(storage, SystemClock())
        try:
            can = store.probe()
        finally:
            store.close()
    except IsterError as error:
        return _failed(
            "bucket",
            error,
            "check the address and credentials in storage.cloud, and that this machine can "
            "reach it",
        )
    able = ["write", "read", "delete"]
    able += ["create conditionally"] if can.conditional_create else []
    able += ["copy"] if can.copy else []
    missing = [
        text
        for text, is_there in (("create conditionally", can.conditional_create), ("copy", can.copy))
        if not is_there
    ]
    says = f"{store.location} answers: can {', '.join(able)}"
    if missing:
        says += f"; cannot {', '.join(missing)}, which is not required"
    if storage.cloud.backend in (CloudBackend.S3, CloudBackend.GCS):
        says += "; unfinished uploads of killed processes stay until a lifecycle rule removes them"
    return Connection(name="bucket", is_ok=True, says=says)


def _try_metadata(storage: StorageConfig) -> Connection:
    metadata = storage.metadata
    if metadata.backend is MetadataBackend.MEMORY:
        return Connection(name="metadata", is_ok=True, says="in memory: nothing to check")
    path = metadata.path or ""
    if metadata.backend is MetadataBackend.SQLITE and not os.path.exists(path):
        found = _try_directory("metadata", os.path.dirname(os.path.abspath(path)), storage.disk)
        if not found.is_ok:
            return found
        return Connection(name="metadata", is_ok=True, says=f"{path} will be created on first use")
    try:
        store = open_metadata(metadata, SystemClock(), read_only=True)
        try:
            is_known = bool(store.range(f"{metadata.root_prefix}/", limit=1))
            usage = store.usage(f"{metadata.root_prefix}/")
        finally:
            store.close()
    except IsterError as error:
        return _failed("metadata", error, "check storage.metadata, and that the store is running")
    where = path if metadata.backend is MetadataBackend.SQLITE else f"etcd {metadata.endpoints[0]}"
    holds = "has keys" if is_known else "has no key yet"
    says = f"{where} answers, and {holds} below {metadata.root_prefix}"
    if usage is not None:
        says += f"; {format_bytes(usage.size_bytes)} of its quota of "
        says += f"{format_bytes(usage.quota_bytes)} taken"
        says += "" if usage.is_compacted else "; it is not compacted"
        says += "".join(f"; alarm: {alarm.strip()}" for alarm in usage.alarms)
    return Connection(
        name="metadata",
        is_ok=usage is None or not usage.alarms,
        says=says,
        hint=None if usage is None else usage.advice,
    )


def _try_identity(storage: StorageConfig) -> Connection:
    """Whether the bucket is the one of the metadata store."""
    name = "bucket id"
    if storage.cloud.backend is CloudBackend.MEMORY:
        return Connection(name=name, is_ok=True, says="in memory: nothing to check")
    try:
        with open_identity(storage, SystemClock()) as identity:
            identity.verify()
            found, recorded = identity.read()
    except IsterError as error:
        return _failed(name, error, "check storage.cloud and storage.metadata")
    if found is None or recorded is None:
        return Connection(name=name, is_ok=True, says="recorded when a broker starts")
    return Connection(name=name, is_ok=True, says=f"{found.id}, as the metadata store expects")


def _failed(name: str, error: IsterError, hint: str) -> Connection:
    text = str(error)
    if error.hint:
        text = text.removesuffix(f"; {error.hint}")
    return Connection(name=name, is_ok=False, says=text, hint=error.hint or hint)
