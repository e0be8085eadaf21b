"""The JSON API of the HTTP port, which the dashboard uses: `ROUTES` lists its paths.

Owns: paths, parameters of GET, status codes, and protection against requests from foreign web
pages. Does not own: authentication (`http_guard`), content (`views`, `browse`), changes
(`changes`), what an operation needs and does (`ister.broker.operations`).

Errors are `{"code", "error", "hint"}`. Each call checks a permission: LOOKUP to read, CONSUME for
messages, PRODUCE to publish, MANAGE_TOPIC and MANAGE_BROKER for changes.

A browser sends requests on behalf of any page. A change needs a header that pages of other origins
cannot send (`X-Ister-Action: yes`), and the page's own origin if an origin is sent. Without
authentication, the request must name this host, which stops DNS rebinding.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import grpc
import msgspec
from aiohttp import web
from google.protobuf.message import Message
from multidict import MultiMapping

from ister.base.clock import Clock
from ister.base.message_filter import MessageFilter
from ister.base.model import JsonObject, TopicName
from ister.base.positions import parse_position
from ister.broker.cluster.peers import may_forward
from ister.broker.http.changes import Changes, parse_letters, plain_topic
from ister.broker.http.requests import Downloads, topic_of
from ister.broker.observe.browse import DOWNLOAD_MAX, LIMIT_DEFAULT, LIMIT_MAX, Browser
from ister.broker.observe.rates import parse_window
from ister.broker.observe.views import Views, list_topics
from ister.broker.rpc.handlers import Refused
from ister.broker.security.guard import Guard, current_principal
from ister.broker.security.rights import Permission
from ister.broker.topics.served_topic import ServedTopic
from ister.broker.topics.topics import ElsewhereError
from ister.config import AuthMode, BrokerConfig
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
from ister.metadata.base import MetadataStore
from ister.wire import Rpc, danube_admin, ister_api, services
from ister.wire.errors import BROKER_FAILED, http_error
from ister.wire.views import ClusterJson, PipelineJson, TopicJson

_log = logging.getLogger("ister.broker.observe.api")

ACTION_HEADER: Final = "X-Ister-Action"
"""Must be `yes` in requests that change something."""

_TOPICS_DEFAULT: Final = 100
_TOPICS_MAX: Final = 500
_PARTITIONS_SHOWN: Final = 200
_SEARCH_CHARACTERS_MAX: Final = 256
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}

_RECENT_POINTS: Final = 60
_REFUSED: Final = {
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.UNAVAILABLE: 503,
}

_Handler = Callable[[web.Request], Awaitable[object]]
_Request = TypeVar("_Request", bound=Message)
_Response = TypeVar("_Response", bound=Message)


def status_of(error: IsterError) -> int:
    """The HTTP status of an error."""
    match error:
        case Refused():
            return _REFUSED.get(error.status, 500)
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


_TOPIC: Final = "/api/topics/{namespace}/{topic}"
_SUBSCRIPTION: Final = _TOPIC + "/subscriptions/{subscription}"


@dataclass(frozen=True, slots=True)
class Route:
    """A path of the API."""

    method: str
    path: str
    handler: str
    """GET: of `Api`; POST: of `Changes`."""
    needs: Rpc[Any, Any] | str
    """The operation that it leads to, with what that needs; or what the handler itself needs."""


ROUTES: Final = (
    Route("GET", "/api/overview", "overview", "`lookup` on any topic"),
    Route("GET", "/api/topics", "topics", "`lookup` on each topic"),
    Route("GET", _TOPIC, "topic", "`lookup` on the topic"),
    Route("GET", f"{_TOPIC}/messages", "messages", "`consume` on the topic"),
    Route("GET", f"{_TOPIC}/messages/download", "download", "`consume` on the topic"),
    Route("GET", f"{_TOPIC}/dead-letters", "letters", services.DeadLetters.Show),
    Route("GET", f"{_TOPIC}/dead-letters/count", "letter_count", services.DeadLetters.Count),
    Route(
        "GET",
        "/api/namespaces/{namespace}/policies",
        "namespace_policies",
        services.NamespaceAdmin.GetNamespacePolicies,
    ),
    Route("GET", "/api/brokers", "brokers", "`lookup` on the cluster"),
    Route("GET", "/api/cluster", "cluster", "`lookup` on the cluster"),
    Route("GET", "/api/pipeline", "pipeline", "`lookup` on the cluster"),
    Route("POST", "/api/topics", "create", services.Admin.CreateTopic),
    Route("POST", f"{_TOPIC}/delete", "delete", services.TopicAdmin.DeleteTopic),
    Route("POST", f"{_TOPIC}/publish", "publish", "`produce` on the topic"),
    Route("POST", f"{_TOPIC}/policies", "set_policies", services.Admin.SetTopicPolicies),
    Route("POST", f"{_TOPIC}/unload", "unload", services.TopicAdmin.UnloadTopic),
    Route("POST", f"{_TOPIC}/move", "move", services.Admin.MoveTopic),
    Route("POST", f"{_TOPIC}/take-over", "take_over", services.Admin.TakeOverTopic),
    Route("POST", f"{_SUBSCRIPTION}/seek", "seek", services.Admin.Seek),
    Route(
        "POST",
        f"{_SUBSCRIPTION}/policy",
        "set_failure_policy",
        services.TopicAdmin.SetSubscriptionFailurePolicy,
    ),
    Route("POST", f"{_SUBSCRIPTION}/delete", "unsubscribe", services.TopicAdmin.Unsubscribe),
    Route("POST", f"{_TOPIC}/dead-letters/requeue", "requeue", services.DeadLetters.Requeue),
    Route("POST", f"{_TOPIC}/dead-letters/drop", "drop", services.DeadLetters.Drop),
    Route(
        "POST",
        "/api/namespaces/{namespace}/policies",
        "set_namespace_policies",
        services.Admin.SetNamespacePolicies,
    ),
    Route("POST", "/api/brokers/{node}/drain", "drain", services.Admin.DrainBroker),
    Route("POST", "/api/brokers/{node}/activate", "activate", services.Admin.ActivateBroker),
    Route("POST", "/api/cluster/rebalance", "rebalance", services.Admin.Rebalance),
    Route(
        "POST",
        "/api/pipeline/requests",
        "request_job",
        "`manage_broker` on the cluster; for some topics, `manage_topic` on each",
    ),
    Route("POST", "/api/clock/confirm", "confirm_clock", "`manage_broker` on the cluster"),
)


class ApiContext:
    """What the API uses, once the broker has its topics."""

    def __init__(
        self,
        views: Views,
        browser: Browser,
        metadata: MetadataStore,
        *,
        operations: Mapping[str, object],
        clock: Clock,
    ) -> None:
        """`operations` are the services whose methods the API calls, by name."""
        self._services = operations
        self.views = views
        self.browser = browser
        self.metadata = metadata
        self.clock = clock

    async def call(self, rpc: Rpc[_Request, _Response], request: _Request) -> _Response:
        """Runs an operation for the current caller, here or at the broker that has to do it."""
        service, _, method = rpc.path[1:].partition("/")
        try:
            answer: _Response = await getattr(self._services[service], method)(request, None)
        except ElsewhereError as error:
            peers = self.views.topics.peers
            if peers is None or not may_forward():
                raise
            topic, timeout = error.topic, error.timeout_seconds
            return await peers.call(error.member, rpc, request, topic=topic, timeout=timeout)
        return answer

    async def stop(self) -> None:
        """Stops browsing and counting."""
        self.browser.end()
        await self.views.stop()


class Api:
    """The handlers. Used on the broker's loop; UNAVAILABLE until `serve` is called."""

    def __init__(self, guard: Guard, config: BrokerConfig) -> None:
        self._guard = guard
        self._config = config
        self._served: ApiContext | None = None
        self._changes = Changes(guard, lambda: self.served)
        self._downloads = Downloads()
        self._hosts = _own_hosts(config)
        self._is_open = config.auth.mode is AuthMode.NONE

    def serve(self, served: ApiContext | None) -> None:
        """Starts answering requests; None stops."""
        self._served = served

    @property
    def served(self) -> ApiContext:
        """What the API uses."""
        if self._served is None:
            raise UnavailableError(
                "the broker is starting or stopping", hint="retry when /ready returns 200"
            )
        return self._served

    def add_routes(self, application: web.Application) -> None:
        """Adds the API's paths."""
        for route in ROUTES:
            if route.method == "GET":
                handler = self._answering(getattr(self, f"_{route.handler}"))
                application.router.add_get(route.path, handler, allow_head=False)
            else:
                change = getattr(self._changes, route.handler)
                application.router.add_post(route.path, self._answering(change, is_action=True))
        application.router.add_route("*", "/api/{rest:.*}", self._answering(self._not_found))

    # -- requests and answers ---------------------------------------------------------------

    def _answering(
        self, handler: _Handler, *, is_action: bool = False
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Wraps a handler: values and errors become JSON."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                self.check_host(request)
                if is_action:
                    _check_action(request)
                content = await handler(request)
                if isinstance(content, web.StreamResponse):
                    return content
                return _response(await self.served.views.query_threads.run(_encode, content), 200)
            except (UnauthenticatedError, PermissionDeniedError):
                raise  # answered by the guard
            except IsterError as error:
                return await self._refusal(request, error)
            except (asyncio.CancelledError, web.HTTPException):
                raise
            except Exception:  # noqa: BLE001 - the caller gets status 500
                number = secrets.token_hex(4)
                _log.exception("request failed", extra={"path": request.path, "number": number})
                content = {
                    "code": "INTERNAL",
                    "error": f"{BROKER_FAILED} [{number}]",
                    "hint": None,
                }
                return _response(_encode(content), 500)

        return answer

    async def _refusal(self, request: web.Request, error: IsterError) -> web.Response:
        status = status_of(error)
        content: JsonObject = {**http_error(error)}
        if isinstance(error, OffsetOutOfRangeError):
            content |= {"earliest": error.earliest, "next": error.next}
        if status == 503 and "topic" in request.match_info:
            owner = await self._owner_of(request)
            if owner is not None:
                status = 409
                content |= {
                    "code": "ABORTED",
                    "error": f"the broker at {owner['broker_url']} serves the topic",
                    "hint": "ask that broker",
                    "owner": owner,
                }
        return _response(_encode(content), status)

    async def _owner_of(self, request: web.Request) -> JsonObject | None:
        """The other broker that serves the topic of a request; None if no other does."""
        served = self._served
        if served is None:
            return None
        views = served.views
        try:
            name = TopicName.parse(topic_of(request))
            address = await views.query_threads.run(views.topics.cluster.owner, name)
        except IsterError:
            return None
        if address is None:
            return None
        return {"node": address.node, "broker_url": address.broker_url}

    def is_for_us(self, request: web.Request) -> bool:
        """Whether a request names this host, by an address or by one of its names."""
        return _is_own_host(request.host, self._hosts)

    def check_host(self, request: web.Request) -> None:
        """Refuses a request for another host name if callers are not authenticated.

        A foreign page may have pointed its name here (DNS rebinding).
        """
        if self._is_open and not self.is_for_us(request):
            raise PermissionDeniedError(
                "the request is for another host",
                hint="use localhost, an IP address, broker.host or a host of broker.advertised; "
                "or set broker.auth",
            )

    def _check(self, permission: Permission, **on: str) -> None:
        self._guard.check(current_principal(), permission, **on)

    async def _not_found(self, request: web.Request) -> object:
        raise NotFoundError(f"path {request.path[:100]} not found", hint="see docs: the HTTP API")

    # -- reading ----------------------------------------------------------------------------

    async def _overview(self, request: web.Request) -> JsonObject:
        caller, guard = current_principal(), self._guard
        guard.check_anywhere(caller, Permission.LOOKUP)
        window = parse_window(request.query.get("window") or "5m")
        views = self.served.views
        visible: list[ServedTopic] | None = None
        if not guard.allows(caller, Permission.LOOKUP):
            served = {topic.name: topic for topic in views.topics.served}
            names = await views.query_threads.run(guard.visible, caller, list(served))
            visible = [served[name] for name in names]
        content = await views.overview(visible, window)
        return {
            **content,
            "auth": {"mode": self._config.auth.mode.value, "principal": str(caller)},
            "rights": {
                "create": guard.allows_anywhere(caller, Permission.MANAGE_TOPIC),
                "brokers": guard.allows(caller, Permission.MANAGE_BROKER),
            },
        }

    async def _topics(self, request: web.Request) -> JsonObject:
        query = request.query
        limit = _whole(query, "limit", _TOPICS_DEFAULT, low=1, high=_TOPICS_MAX)
        namespace, after = query.get("namespace", ""), query.get("after", "")
        search = query.get("search", "")[:_SEARCH_CHARACTERS_MAX].lower()
        views, is_folded = self.served.views, query.get("fold") == "yes"
        found = await list_topics(
            views,
            self._guard,
            namespace=namespace,
            search=search,
            after=after,
            limit=limit,
            with_partitions=not is_folded,
        )
        listed: list[TopicJson] = found["topics"]  # type: ignore[assignment]
        if is_folded:
            await _describe_partitions(views, listed)
        names = [name for one in listed for name in (one["topic"], *one.get("partitions", ()))]
        return {**found, "recent": _recent(views, names)}

    async def _topic(self, request: web.Request) -> TopicJson:
        name = topic_of(request)
        self._check(Permission.LOOKUP, topic=name)
        views = self.served.views
        view = await views.topic(name, window=parse_window(request.query.get("window") or "5m"))
        caller = current_principal()
        view["rights"] = {
            "consume": self._guard.allows(caller, Permission.CONSUME, topic=name),
            "produce": self._guard.allows(caller, Permission.PRODUCE, topic=name),
            "manage": self._guard.allows(caller, Permission.MANAGE_TOPIC, topic=name),
        }
        partitions = view.get("partitions") or []
        if partitions:
            shown = partitions[:_PARTITIONS_SHOWN]
            view["topics"] = await views.topics_listed(shown)
            view["recent"] = _recent(views, shown)
        else:
            view["own_policies"] = await views.own_policies(name)
            sources = views.dead_letter_sources(name)
            seen = set(self._guard.visible(caller, {one["topic"] for one in sources}))
            view["dead_letters_of"] = [one for one in sources if one["topic"] in seen]
        return view

    async def _messages(self, request: web.Request) -> JsonObject:
        query = request.query
        self._check(Permission.CONSUME, topic=topic_of(request))
        return await self.served.browser.read(
            await plain_topic(self.served.views, request),
            start=parse_position(query.get("start") or "latest"),
            end=_end(query),
            limit=_whole(query, "limit", LIMIT_DEFAULT, low=1, high=LIMIT_MAX),
            wanted=_filter(query),
        )

    async def _download(self, request: web.Request) -> web.StreamResponse:
        return await self._downloads.send(request, lambda: self._read_lines(request))

    async def _read_lines(self, request: web.Request) -> tuple[list[bytes], dict[str, str]]:
        query, name = request.query, topic_of(request)
        self._check(Permission.CONSUME, topic=name)
        found = await self.served.browser.download(
            await plain_topic(self.served.views, request),
            start=parse_position(query.get("start") or "latest"),
            end=_end(query),
            limit=_whole(query, "limit", DOWNLOAD_MAX, low=1, high=DOWNLOAD_MAX),
            wanted=_filter(query),
        )
        return found.lines, {
            **_HEADERS,
            "Content-Type": "application/x-ndjson; charset=utf-8",
            "Content-Disposition": f'attachment; filename="{name[1:].replace("/", "-")}.jsonl"',
            "X-Ister-Messages": str(len(found.lines)),
            "X-Ister-Next": str(found.next),
        }

    async def _brokers(self, request: web.Request) -> JsonObject:
        self._check(Permission.LOOKUP)
        return {"brokers": await self.served.views.brokers()}

    async def _cluster(self, request: web.Request) -> ClusterJson:
        self._check(Permission.LOOKUP)
        found, caller = await self.served.views.cluster(), current_principal()
        found["rights"] = {
            "brokers": self._guard.allows(caller, Permission.MANAGE_BROKER),
            "topics": self._guard.allows(caller, Permission.MANAGE_TOPIC),
        }
        return found

    async def _letters(self, request: web.Request) -> JsonObject:
        return await self._ask_letters(services.DeadLetters.Show, request)

    async def _letter_count(self, request: web.Request) -> JsonObject:
        return await self._ask_letters(services.DeadLetters.Count, request)

    async def _ask_letters(
        self,
        rpc: Rpc[ister_api.DeadLettersRequest, ister_api.Document],
        request: web.Request,
    ) -> JsonObject:
        served, asked = self.served, parse_letters(topic_of(request), request.query)
        found: JsonObject = json.loads((await served.call(rpc, asked)).json)
        return found

    async def _namespace_policies(self, request: web.Request) -> JsonObject:
        asked = danube_admin.NamespaceRequest(name=request.match_info["namespace"])
        found = await self.served.call(services.NamespaceAdmin.GetNamespacePolicies, asked)
        return {"policies": json.loads(found.policies)}

    async def _pipeline(self, request: web.Request) -> PipelineJson:
        self._check(Permission.LOOKUP)
        return await self.served.views.pipeline()


def _recent(views: Views, names: list[str]) -> dict[str, list[float]]:
    """The last messages in/s of topics that were used, for small lines."""
    found = {name: views.history.recent(name, _RECENT_POINTS) for name in names}
    return {name: points for name, points in found.items() if points}


async def _describe_partitions(views: Views, listed: list[TopicJson]) -> None:
    """Adds short descriptions of partitions, up to a number of them."""
    room = _PARTITIONS_SHOWN
    for one in listed:
        names = one.get("partitions", [])[:room]
        if names:
            room -= len(names)
            one["topics"] = await views.topics_listed(names)


# -- parts of requests ----------------------------------------------------------------------


def _whole(query: Mapping[str, str], name: str, default: int, *, low: int, high: int) -> int:
    text = query.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        raise InvalidRequestError(f"{name} must be a whole number, not {text[:40]!r}")
    return max(low, min(int(text), high))


def _end(query: Mapping[str, str]) -> int | None:
    return _whole(query, "end", 0, low=0, high=(1 << 63) - 1) if query.get("end") else None


def _filter(query: MultiMapping[str]) -> MessageFilter:
    return MessageFilter.parse(
        keys=query.getall("key", []),
        attributes=query.getall("attribute", []),
        where=query.getall("where", []),
        contains=query.get("contains", ""),
    )


def _check_action(request: web.Request) -> None:
    """Refuses requests that a page of another origin could have sent."""
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
    """Whether a page of `origin` was served by `host`; the scheme may be that of a proxy."""
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
    """Whether a `Host` header names this host, by an address or by one of its names."""
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


def _encode(content: object) -> bytes:
    return msgspec.json.encode(content)


def _response(body: bytes, status: int) -> web.Response:
    return web.Response(
        body=body, status=status, content_type="application/json", charset="utf-8", headers=_HEADERS
    )
