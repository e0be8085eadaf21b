"""`ister.testing` as far as no broker is needed; `test_python_surface` runs one."""

import os

import pytest

pytest.importorskip("grpc")

from ister.testing import _kept


def test_a_child_process_that_leaves_the_block_does_not_delete_the_data():
    kept = _kept(None)
    directory = kept.__enter__()
    child = os.fork()
    if child == 0:
        try:
            kept.__exit__(None, None, None)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.path.isdir(directory)
    kept.__exit__(None, None, None)
    assert not os.path.exists(directory)
