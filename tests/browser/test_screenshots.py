"""Pictures of the pages, for the documents.

    ISTER_SCREENSHOTS=1 pytest tests/browser/test_screenshots.py      # docs/images, six minutes

With the variable, a shop trades for a while beside a pipeline (Spark), and the pictures go to the
documents. Without it they are taken of whatever there is, to see that they show something.
"""

import os
import signal
import struct
import subprocess
import sys
import tempfile
import urllib.request
import zlib
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.servers.broker import BrokerProcess
from tests.support.dashboard import Site, eventually, running_shop, settled

IS_WANTED = os.environ.get("ISTER_SCREENSHOTS") == "1"
IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
TRADING_SECONDS = 300
BYTES_MAX = 250_000

DESK = {"viewport": {"width": 1280, "height": 960}}
PHONE = {
    "viewport": {"width": 390, "height": 844},
    "device_scale_factor": 1.5,
    "is_mobile": True,
    "has_touch": True,
}
SHOTS = {
    "overview": ("#/", DESK),
    "topic": ("#/topics/default/orders", DESK),
    "messages": ("#/topics/default/orders/messages", DESK),
    "pipeline": ("#/pipeline", DESK),
    "phone": ("#/topics/default/orders", PHONE),
}
SETTINGS = {
    "storage": {
        "wal": {
            "rotate_max_bytes": 1 << 20,
            "retention": {
                "check_interval_minutes": 1,
                "time_minutes": 1,
                "active_subscription_grace_seconds": 0,
            },
        },
        "uploader": {"engine": "auto", "interval_seconds": 20, "max_object_bytes": 1 << 20},
    },
    "pipeline": {"compact": {"every_minutes": 60}, "scrub": {"every_minutes": 1440}},
}


@contextmanager
def a_pipeline(broker):
    """`ister pipeline run` beside a broker."""
    command = [sys.executable, "-m", "ister.cli.main", "pipeline", "run"]
    process = subprocess.Popen(
        [*command, f"--config={broker.directory / 'ister.yml'}", f"--broker={broker.flight}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.fixture(scope="module")
def site(request):
    if not IS_WANTED:
        yield request.getfixturevalue("shop")
        return
    request.getfixturevalue("browser")
    with (
        tempfile.TemporaryDirectory(prefix="ister-shop-") as directory,
        BrokerProcess(directory, settings=SETTINGS) as broker,
        a_pipeline(broker),
        running_shop(broker.address, is_trading=True),
    ):
        site = Site(broker)
        eventually(lambda: site.api("/api/pipeline")["is_running"], within=120)
        # Objects from before the compaction are merged, those since are as they were uploaded.
        for at, job in ((TRADING_SECONDS / 2, "compact"), (TRADING_SECONDS, "scrub")):
            eventually(lambda at=at: _uptime(site) > at, within=at + 120)
            _ask_for(site, job)
            eventually(lambda job=job: job in site.api("/api/pipeline")["reports"], within=180)
        yield site


def _uptime(site):
    return site.api("/api/overview")["broker"]["uptime_seconds"]


def _ask_for(site, job):
    request = urllib.request.Request(
        f"{site.url}/api/pipeline/requests",
        data=f'{{"job": "{job}", "topics": null}}'.encode(),
        headers={"Content-Type": "application/json", "X-Ister-Action": "yes"},
    )
    with urllib.request.urlopen(request, timeout=30):
        pass


def rows_of(png):
    """The size of a picture, and how many of its rows differ from the one above."""
    assert png.startswith(b"\x89PNG")
    width, height, _, colour = struct.unpack(">IIBB", png[16:26])
    at, data = 8, b""
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + size]
        at += 12 + size
    stride = 1 + width * {2: 3, 6: 4}[colour]
    rows = zlib.decompress(data)
    return width, height, len({rows[i : i + stride] for i in range(0, len(rows), stride)})


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SHOTS)
def test_screenshot(site, open_page, tmp_path, name):
    route, options = SHOTS[name]
    page = open_page(site, route, color_scheme="light", **options)
    settled(page)
    if name == "messages":
        page.locator("button.toggle").nth(2).click()
        page.wait_for_selector("tr.extra")
    page.wait_for_timeout(300)
    path = (IMAGES if IS_WANTED else tmp_path) / f"dashboard-{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = page.screenshot(path=path, animations="disabled")
    width, height, rows = rows_of(picture)
    scale = options.get("device_scale_factor", 1)
    assert width == options["viewport"]["width"] * scale
    assert height == options["viewport"]["height"] * scale
    assert rows > height / 5, f"{rows} rows of {height} show something"
    assert len(picture) < BYTES_MAX
