"""What README and docs/BROKER.md show of the broker is run as it is written."""

import contextlib
import io
import re
from pathlib import Path

import pytest

pytest.importorskip("danube")

from danube import DanubeClientBuilder, DispatchStrategy  # noqa: F401 - named in the document

from danube_rig import run
from servers.broker import BrokerProcess

ROOT = Path(__file__).parents[2]
ADDRESS = "127.0.0.1:6650"


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with BrokerProcess(tmp_path_factory.mktemp("broker")) as broker:
        yield broker


def examples(document: str, beginning: str) -> list[str]:
    found = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    return [one for one in found if one.startswith(beginning)]


@pytest.mark.parametrize("document", ["README.md", "docs/BROKER.md"])
def test_example_of_the_client_runs_as_written(broker, document):
    (example,) = examples(document, "from ister.client import Client")
    assert ADDRESS in example
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(example.replace(ADDRESS, broker.address), document, "exec"), {})
    if "print" in example:
        assert len(shown.getvalue().splitlines()) == 1000


def test_example_of_danubes_client_runs_as_written(broker):
    (example,) = examples("docs/BROKER.md", "from danube import")
    assert ADDRESS in example
    body = example.replace(ADDRESS, broker.address).replace("\n", "\n    ")
    scope: dict[str, object] = {}
    exec(f"async def example():\n    {body}\n    return producer\n", scope)

    async def scenario():
        producer = await scope["example"]()
        await producer.create()
        await producer.send(b"as documented")
        await producer.close()

    run(scenario())
