"""The JSON API of the HTTP port: what the dashboard shows, and the few things that it does.

    GET  /api/overview                                   the broker, in numbers and in words
    GET  /api/topics                                     topics in short, a page of them
    GET  /api/topics/{ns}/{topic}                        all about one
    GET  /api/topics/{ns}/{topic}/messages               some of its messages
    GET  /api/brokers, /api/pipeline
    POST /api/topics/{ns}/{topic}/subscriptions/{s}/seek
    POST /api/topics/{ns}/{topic}/unload
    POST /api/pipeline/requests
    POST /api/clock/confirm

Owns: paths, parameters, status codes, and that a page of somebody else's cannot use a browser that
can reach this port. Does not own: who calls (`http_guard`), what is said (`views`, `browse`).

Errors are `{"code", "error", "hint"}`. Rights are asked for per call: LOOKUP to look, CONSUME for
messages, MANAGE_TOPIC and MANAGE_BROKER for what changes something.

A browser sends requests in the name of any page. What changes something needs a header that other
origins' pages cannot send (`X-Ister-Action: yes`), and the page's own origin where one is sent.
Where nobody has to say who they are, the request has to be for this machine by a name that is its
own: a page whose name was made to point here (DNS rebinding) gets nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from aiohttp import web

from ister.broker.browse import LIMIT_DEFAULT, LIMIT_MAX, Browser, parse_start
from ister.broker.security.guard import Guard, current_principal
from ister.broker.security.rights import Permission
from ister.broker.served import ServedTopic
from ister.broker.views import Views, describe_subscription, list_topics
from ister.clock import Clock
from ister.config import AuthMode, BrokerConfig, StorageMode
from ister.errors import (
    CapacityError,
    ConflictError,
    FencedError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
    OffsetOutOfRangeError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedOperationError,
)
from ister.limits import KIB
from ister.metadata.base import MetadataStore
from ister.model import Start, TopicName
from ister.tier.pipeline import PipelineKeys
from ister.tier.pipeline_requests import request_job

__all__ = ["ACTION_HEADER", "Api", "Served", "status_of"]

_log = logging.getLogger("ister.broker.api")

ACTION_HEADER: Final = "X-Ister-Action"
"""Has to be `yes` for whatever changes something."""

_TOPICS_DEFAULT: Final = 100
_TOPICS_MAX: Final = 500
_TOPICS_ASKED_MAX: Final = 1001
_SEARCH_CHARACTERS_MAX: Final = 256
_BODY_BYTES_MAX: Final = 64 * KIB
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}

_Handler = Callable[[web.Request], Awaitable[Any]]


def status_of(error: IsterError) -> int:
    """The status that goes with an error."""
    match error:
        case UnauthenticatedError():
            return 401
        case PermissionDeniedError():
            return 403
        case NotFoundError():
            return 404
        case FencedError():
            return 503
        case ConflictError():
            return 409
        case InvalidRequestError() | OffsetOutOfRangeError() | UnsupportedOperationError():
            return 400
        case CapacityError():
            return 503
        case _ if error.code == "UNAVAILABLE":
            return 503
    return 500


class Served:
    """What the API works on, once the broker has its topics."""

    def __init__(
        self, views: Views, browser: Browser, metadata: MetadataStore, *, clock: Clock
    ) -> None:
        self.views = views
        self.browser = browser
        self.metadata = metadata
        self.clock = clock

    async def stop(self) -> None:
        """Ends what is under way."""
        self.browser.end()
        await self.views.stop()


class Api:
    """The handlers. Used on the broker's loop; UNAVAILABLE until `serve` was called."""

    def __init__(self, guard: Guard, config: BrokerConfig) -> None:
        self._guard = guard
        self._config = config
        self._served: Served | None = None
        self._hosts = _own_hosts(config)
        self._is_open = config.auth.mode is AuthMode.NONE

    def serve(self, served: Served | None) -> None:
        """Begins to answer, or ends it."""
        self._served = served

    @property
    def served(self) -> Served:
        """What there is to work on.

        Raises:
            UnavailableError: The broker is starting, or ending.
        """
        if self._served is None:
            raise UnavailableError(
                "the broker is starting or ending", hint="come again in a moment; /ready says when"
            )
        return self._served

    def add_routes(self, application: web.Application) -> None:
        """Adds the API's paths."""
        topic = "/api/topics/{namespace}/{topic}"
        for path, handler in {
            "/api/overview": self._overview,
            "/api/topics": self._topics,
            topic: self._topic,
            f"{topic}/messages": self._messages,
            "/api/brokers": self._brokers,
            "/api/pipeline": self._pipeline,
        }.items():
            application.router.add_get(path, self._answering(handler), allow_head=False)
        for path, handler in {
            f"{topic}/subscriptions/{{subscription}}/seek": self._seek,
            f"{topic}/unload": self._unload,
            "/api/pipeline/requests": self._request_job,
            "/api/clock/confirm": self._confirm_clock,
        }.items():
            application.router.add_post(path, self._answering(handler, is_action=True))
        application.router.add_route("*", "/api/{rest:.*}", self._answering(self._nothing))

    # -- requests and answers ---------------------------------------------------------------

    def _answering(
        self, handler: _Handler, *, is_action: bool = False
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """A handler whose values and errors become JSON."""

        async def answer(request: web.Request) -> web.Response:
            try:
                self.check_host(request)
                if is_action:
                    _check_action(request)
                content = await handler(request)
                return _response(await self.served.views.lookers.run(_encode, content), 200)
            except (UnauthenticatedError, PermissionDeniedError):
                raise  # the guard in front answers it
            except IsterError as error:
                return await self._refusal(request, error)
            except (asyncio.CancelledError, web.HTTPException):
                raise
            except Exception:  # noqa: BLE001 - whatever it is, the caller is told
                number = secrets.token_hex(4)
                _log.exception("a request failed", extra={"path": request.path, "number": number})
                words = f"the broker failed [{number}]"
                return _response(_encode({"code": "INTERNAL", "error": words, "hint": None}), 500)

        return answer

    async def _refusal(self, request: web.Request, error: IsterError) -> web.Response:
        status = status_of(error)
        content: dict[str, Any] = {"code": error.code, "error": error.message, "hint": error.hint}
        if isinstance(error, OffsetOutOfRangeError):
            content |= {"earliest": error.earliest, "next": error.next}
        if status == 503 and "topic" in request.match_info:
            owner = await self._owner_of(request)
            if owner is not None:
                status = 409
                content |= {
                    "code": "ABORTED",
                    "error": f"the broker at {owner['broker_url']} has the topic",
                    "hint": "ask that broker",
                    "owner": owner,
                }
        return _response(_encode(content), status)

    async def _owner_of(self, request: web.Request) -> dict[str, Any] | None:
        """The other broker that has the topic of a request; None if no other has."""
        served = self._served
        if served is None:
            return None
        views = served.views
        try:
            name = TopicName.parse(_topic_of(request))
            address = await views.lookers.run(views.topics.cluster.owner, name)
        except IsterError:
            return None
        if address is None:
            return None
        return {"node": address.node, "broker_url": address.broker_url}

    def is_for_us(self, request: web.Request) -> bool:
        """Whether a request is for this machine by an address, or by a name of its own."""
        return _is_own_host(request.host, self._hosts)

    def check_host(self, request: web.Request) -> None:
        """Refuses a request by a name that is not this broker's, where nobody says who they are.

        A page of somebody else's may have made its name point here (DNS rebinding).

        Raises:
            PermissionDeniedError: It is for another host.
        """
        if self._is_open and not self.is_for_us(request):
            raise PermissionDeniedError(
                "the request is for another host",
                hint="use localhost, an IP address, broker.host or a host of broker.advertised; "
                "or have callers say who they are: broker.auth",
            )

    def _check(self, permission: Permission, **on: str) -> None:
        self._guard.check(current_principal(), permission, **on)

    async def _nothing(self, request: web.Request) -> Any:  # noqa: ANN401 - it never answers
        raise NotFoundError("there is nothing here", hint="docs: the HTTP API")

    # -- looking ----------------------------------------------------------------------------

    async def _overview(self, request: web.Request) -> dict[str, Any]:
        caller, guard = current_principal(), self._guard
        guard.check_anywhere(caller, Permission.LOOKUP)
        views = self.served.views
        visible: list[ServedTopic] | None = None
        if not guard.allows(caller, Permission.LOOKUP):
            served = {topic.name: topic for topic in views.topics.served}
            names = await views.lookers.run(guard.visible, caller, list(served))
            visible = [served[name] for name in names]
        content = await views.overview(visible)
        if visible is not None:
            content["brokers"] = [one for one in content["brokers"] if one["is_this"]]
            content["disk"] = None
        return {
            **content,
            "auth": {"mode": self._config.auth.mode.value, "principal": str(caller)},
        }

    async def _topics(self, request: web.Request) -> dict[str, Any]:
        query = request.query
        limit = _whole(query, "limit", _TOPICS_DEFAULT, low=1, high=_TOPICS_MAX)
        namespace, after = query.get("namespace", ""), query.get("after", "")
        search = query.get("search", "")[:_SEARCH_CHARACTERS_MAX].lower()
        return await list_topics(
            self.served.views,
            self._guard,
            namespace=namespace,
            search=search,
            after=after,
            limit=limit,
        )

    async def _topic(self, request: web.Request) -> dict[str, Any]:
        name = _topic_of(request)
        self._check(Permission.LOOKUP, topic=name)
        view = await self.served.views.topic(name)
        caller = current_principal()
        view["rights"] = {
            "consume": self._guard.allows(caller, Permission.CONSUME, topic=name),
            "manage": self._guard.allows(caller, Permission.MANAGE_TOPIC, topic=name),
        }
        return view

    async def _messages(self, request: web.Request) -> dict[str, Any]:
        query = request.query
        self._check(Permission.CONSUME, topic=_topic_of(request))
        return await self.served.browser.read(
            await self._plain_topic(request),
            start=parse_start(query.get("start") or "latest"),
            end=_whole(query, "end", 0, low=0, high=(1 << 63) - 1) if query.get("end") else None,
            limit=_whole(query, "limit", LIMIT_DEFAULT, low=1, high=LIMIT_MAX),
        )

    async def _brokers(self, request: web.Request) -> dict[str, Any]:
        self._check(Permission.LOOKUP)
        return {"brokers": await self.served.views.brokers()}

    async def _pipeline(self, request: web.Request) -> dict[str, Any]:
        self._check(Permission.LOOKUP)
        return await self.served.views.pipeline()

    # -- doing ------------------------------------------------------------------------------

    async def _plain_topic(self, request: web.Request) -> str:
        """The topic of a request that one topic has to be named in.

        Raises:
            InvalidRequestError: It is a partitioned one.
        """
        name, topics = _topic_of(request), self.served.views.topics
        if topics.find_open(name) is None:
            partitions = await topics.partitions(name)
            if partitions and partitions != [name]:
                raise InvalidRequestError(
                    f"{name} is a partitioned topic with {len(partitions)} partitions",
                    topic=name,
                    hint=f"name one of them, such as {partitions[0]}",
                )
        return name

    async def _seek(self, request: web.Request) -> dict[str, Any]:
        self._check(Permission.MANAGE_TOPIC, topic=_topic_of(request))
        name, subscription = await self._plain_topic(request), request.match_info["subscription"]
        start = _parse_to((await _body(request)).get("to"))
        views = self.served.views
        topic = await views.topics.get(name)
        found = topic.reliable_subscription(subscription)
        self._guard.check_subscription(current_principal(), found, topic=name)
        offset = await views.topics.searches.start_of(
            found.topic, start, is_gone=lambda: request.transport is None
        )
        await found.seek(offset)
        return {
            "done": f"subscription {subscription} goes on from offset {offset}",
            "offset": offset,
            "subscription": describe_subscription(found),
        }

    async def _unload(self, request: web.Request) -> dict[str, Any]:
        self._check(Permission.MANAGE_TOPIC, topic=_topic_of(request))
        name = await self._plain_topic(request)
        await _body(request)
        views = self.served.views
        topics = views.topics
        is_reliable = (await topics.get(name)).is_reliable
        await topics.unload(name)
        if topics.log.tiers is None or not is_reliable:
            what = "it is closed, and is opened again when somebody uses it"
        elif len(await views.brokers()) > 1:
            what = "all of it is in the bucket, and another broker may have it"
        else:
            what = "all of it is in the bucket; this broker opens it again when somebody uses it"
        return {"done": f"{name} was unloaded: {what}"}

    async def _confirm_clock(self, request: web.Request) -> dict[str, Any]:
        self._check(Permission.MANAGE_BROKER)
        await _body(request)
        served = self.served
        step = await served.views.lookers.run(served.views.topics.log.confirm_clock)
        if step is None:
            return {"done": "nothing to confirm: the clock is trusted", "seconds": None}
        return {
            "done": "clock confirmed; deletion by age resumes",
            "seconds": round(step.seconds),
        }

    async def _request_job(self, request: web.Request) -> dict[str, Any]:
        body = await _body(request)
        job, topics = body.get("job"), body.get("topics")
        if topics is None:
            self._check(Permission.MANAGE_BROKER)
        elif not isinstance(topics, list) or not all(isinstance(one, str) for one in topics):
            raise InvalidRequestError("topics are a list of names, or null for all of them")
        else:
            topics = [str(TopicName.parse(topic)) for topic in topics[:_TOPICS_ASKED_MAX]]
            for topic in topics:
                self._check(Permission.MANAGE_TOPIC, topic=topic)
        if not isinstance(job, str):
            raise InvalidRequestError("the job has no name", hint='as in {"job": "compact"}')
        served = self.served
        storage = served.views.topics.config.storage
        if storage.mode is not StorageMode.WAL_CLOUD:
            raise ConflictError(
                f"storage.mode is {storage.mode.value}: without a bucket there is no pipeline",
                hint="a log with storage.mode wal_cloud has one",
            )
        asked = await served.views.lookers.run(
            request_job,
            served.metadata,
            PipelineKeys(storage.metadata.root_prefix),
            job,
            by=str(current_principal()),
            topics=topics,
            clock=served.clock,
        )
        # Others may have asked for topics that the caller may not know of.
        told = {**asked.as_json(), "topics": topics if asked.topics is not None else None}
        which = "" if topics is None else f" of {', '.join(topics[:3])}"
        more = len(topics or ()) - 3
        which += f" and {more} more topics" if more > 0 else ""
        return {
            "done": f"the pipeline was asked for {job}{which}: it begins as soon as it can",
            "request": {**told, "job": job, "state": "waiting"},
        }


# -- parts of requests ----------------------------------------------------------------------


def _topic_of(request: web.Request) -> str:
    return f"/{request.match_info['namespace']}/{request.match_info['topic']}"


def _whole(query: Mapping[str, str], name: str, default: int, *, low: int, high: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        raise InvalidRequestError(f"{name} is a whole number, not {text[:40]!r}")
    return max(low, min(int(text), high))


def _parse_to(to: object) -> Start:
    if isinstance(to, int) and not isinstance(to, bool) and 0 <= to < 1 << 63:
        return to
    if isinstance(to, str):
        return parse_start(to)
    raise InvalidRequestError(
        "`to` says where: an offset, earliest, latest, or a time as t:2026-01-31T12:00:00Z"
    )


async def _body(request: web.Request) -> dict[str, Any]:
    data = b""
    async for chunk in request.content.iter_chunked(16 * KIB):
        data += chunk
        if len(data) > _BODY_BYTES_MAX:
            raise InvalidRequestError(f"a request of more than {_BODY_BYTES_MAX} bytes")
    try:
        content = json.loads(data or b"{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("the request is not JSON") from error
    if not isinstance(content, dict):
        raise InvalidRequestError("the request is a JSON object")
    return content


def _check_action(request: web.Request) -> None:
    """Refuses what a page of another origin could have sent."""
    headers = request.headers
    if headers.get(ACTION_HEADER) != "yes":
        raise PermissionDeniedError(
            f"the header {ACTION_HEADER} is missing", hint=f"send `{ACTION_HEADER}: yes`"
        )
    origin = headers.get("Origin")
    is_foreign = headers.get("Sec-Fetch-Site") in ("cross-site", "same-site")
    if is_foreign or (origin is not None and not _is_same(origin, request.host)):
        raise PermissionDeniedError("the request comes from a page of another origin")
    if request.content_type != "application/json":
        raise InvalidRequestError(
            "the request is not JSON", hint="send `Content-Type: application/json`"
        )


def _is_same(origin: str, host: str) -> bool:
    """Whether a page of `origin` was served by `host`: only the scheme may be a proxy's."""
    try:
        page = urlsplit(origin)
        return page.scheme in ("http", "https") and _place(page.netloc, page.scheme) == _place(
            host, page.scheme
        )
    except ValueError:
        return False


def _place(netloc: str, scheme: str) -> tuple[str | None, int]:
    parts = urlsplit(f"{scheme}://{netloc}")
    return parts.hostname, parts.port or (443 if scheme == "https" else 80)


def _own_hosts(config: BrokerConfig) -> frozenset[str]:
    hosts = {"localhost", config.host}
    advertised = config.advertised
    for url in (advertised.broker_url, advertised.connect_url, advertised.flight_url):
        host = _host_of(url.partition("://")[2] or url) if url else None
        if host is not None:
            hosts.add(host)
    return frozenset(host.lower() for host in hosts)


def _host_of(netloc: str) -> str | None:
    try:
        return urlsplit(f"//{netloc}").hostname
    except ValueError:
        return None


def _is_own_host(netloc: str, hosts: frozenset[str]) -> bool:
    """Whether a `Host` header names this machine: by an address, or by a name of its own."""
    host = _host_of(netloc)
    if host is None:
        return False
    if host.rstrip(".") in hosts:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _encode(content: Any) -> bytes:  # noqa: ANN401 - JSON
    return json.dumps(content).encode()


def _response(body: bytes, status: int) -> web.Response:
    return web.Response(
        body=body, status=status, content_type="application/json", charset="utf-8", headers=_HEADERS
    )
