"""What tests of the dashboard work with: a broker as a site, and the shop beside it.

site = Site(broker)
site.api("/api/topics")                         # what the pages are made of
page = open_page(site, "#/topics")              # a fixture of `conftest`
settled(page)
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from ister import wire
from ister.client import Client
from ister.wire import danube_admin
from tests.servers.broker import BrokerProcess
from tests.support.security import sign
from tests.support.waiting import eventually

__all__ = [
    "PATIENCE_SECONDS",
    "Site",
    "eventually",
    "reads",
    "running_shop",
    "says",
    "set_up_rights",
    "settled",
    "until",
]

PATIENCE_SECONDS = 60.0
SHOP_SETTINGS = {
    "storage": {
        "wal": {"rotate_max_bytes": 65_536},
        # Nothing is uploaded by the clock: what is not in the bucket stays so while a test looks.
        "uploader": {
            "engine": "embedded",
            "interval_seconds": 3600,
            "max_batch_bytes": 131_072,
            "max_object_bytes": 98_304,
        },
    }
}


class Site:
    """A broker, as browsers and programs see it."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker

    @property
    def url(self) -> str:
        return f"http://{self.broker.http}"

    @property
    def address(self) -> str:
        return self.broker.address

    def api(self, path: str, *, token: str | None = None) -> dict[str, Any]:
        """What the API answers."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"{self.url}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def headers(self, path: str, **sent: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content of any path."""
        request = urllib.request.Request(f"{self.url}{path}", headers=sent)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, dict(error.headers), error.read()

    def subscription(self, topic: str, name: str) -> dict[str, Any]:
        """A subscription as the API describes it."""
        found = self.api(f"/api/topics{topic}")["subscriptions"]
        return next(one for one in found if one["name"] == name)

    def publish(self, topic: str, *payloads: bytes) -> None:
        """Publishes with a client that is gone afterwards."""
        with Client(self.address) as client, client.producer(topic, create=True) as producer:
            for payload in payloads:
                producer.send(payload)


def until(page: Any, expression: str, *, within: float = PATIENCE_SECONDS) -> Any:
    """Waits until a JavaScript expression is true.

    Playwright's own way evaluates text in the page, which the page's policy forbids.
    """
    deadline = time.monotonic() + within
    while not (found := page.evaluate(f"() => ({expression})")):
        assert time.monotonic() < deadline, f"never happened within {within} s: {expression}"
        page.wait_for_timeout(50)
    return found


def settled(page: Any) -> None:
    """Waits until the page of the address is shown, and has its data."""
    until(
        page,
        "(location.hash || '#/').split('?')[0] === document.querySelector('main').dataset.route",
    )
    page.wait_for_selector("main h1")
    page.wait_for_selector("main .loading", state="detached")


def says(where: Any, text: str) -> None:
    """Waits until an element contains a text: a page shows a part of itself before the rest."""
    _wait_for_text(where, text, lambda found: text in found)


def reads(where: Any, text: str) -> None:
    """Waits until a text is all that an element contains."""
    _wait_for_text(where, text, lambda found: found == text)


def _wait_for_text(where: Any, text: str, is_there: Callable[[str], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_there(found := where.inner_text()):
        assert time.monotonic() < deadline, f"{text!r} never came; there is {found!r}"
        time.sleep(0.05)


@contextmanager
def running_shop(address: str, *, is_trading: bool = False) -> Iterator[None]:
    """The process of `shop.py`; begins when everything is published."""
    script = Path(__file__).with_name("shop.py")
    process = subprocess.Popen(
        [sys.executable, str(script), address, *(["--traffic"] if is_trading else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "filled\n", "the shop did not open"
        yield
    finally:
        process.stdin.close()
        try:
            process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def set_up_rights(address: str) -> None:
    """A topic of `root`'s, which `reader` may look at and consume, and `viewer` may look at."""
    with Client(address, token=sign("root")) as client:
        client.admin.create_topic("/default/secrets")
        with client.producer("/default/secrets") as producer:
            producer.publish(b"the answer is 42")
        with client.consumer("/default/secrets", "audit", start="earliest") as consumer:
            consumer.ack(consumer.receive(60))
    with grpc.insecure_channel(address) as channel:
        admin = wire.stub(channel, "danube_admin.SecurityAdmin")
        metadata = [("authorization", f"Bearer {sign('root')}")]
        admin.CreateRole(
            danube_admin.CreateRoleRequest(
                role=danube_admin.RoleDefinition(name="viewer", permissions=["Lookup"])
            ),
            metadata=metadata,
        )
        for name, role in (("reader", "consumer"), ("viewer", "viewer")):
            admin.CreateBinding(
                danube_admin.CreateBindingRequest(
                    binding=danube_admin.BindingDefinition(
                        id=f"{name}-{role}",
                        principal_type="user",
                        principal_name=name,
                        role_names=[role],
                        scope="cluster",
                    )
                ),
                metadata=metadata,
            )
