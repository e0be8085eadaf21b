"""How long it takes from the start of a broker to the first message, in seconds of CPU."""

import ast
import resource
import subprocess
import sys

import pytest

from tests.servers.broker import BrokerProcess

# Of three processes, one after the other.
CPU_SECONDS_MAX = 5.0


def children_cpu():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.nightly
def test_first_message_takes_five_seconds_at_most(tmp_path):
    def ister(*words, given=""):
        return subprocess.run(
            [sys.executable, "-m", "ister.cli.main", *words, "--broker", broker.address],
            input=given,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    before = children_cpu()
    with BrokerProcess(tmp_path) as broker:
        ister("produce", "/default/t", given="hello\n")
        assert ister("consume", "/default/t", "--no-follow") == "hello\n"
        used = broker.cpu_seconds() + children_cpu() - before
    assert used < CPU_SECONDS_MAX, f"{used:.1f} s of CPU"


@pytest.mark.nightly
def test_broker_starts_without_libraries_that_few_brokers_need():
    code = "import sys, ister.broker.server; print([*sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"jsonschema", "numba", "pyspark"} & set(ast.literal_eval(done.stdout))
