"""The examples of docs/WRITING-TESTS.md are tests, and are run here."""

from tests.doc_runner.pages import ROOT, read_page

_PAGE = ROOT / "docs" / "WRITING-TESTS.md"
_RIGS = 5

for _block in read_page(_PAGE).blocks:
    if _block.language == "python":
        # As many lines before it as on the page, so that a traceback shows the right ones.
        exec(compile("\n" * _block.line + _block.text, str(_PAGE), "exec"), globals())


def test_each_rig_has_an_example():
    examples = [name for name, test in globals().items() if _is_on_the_page(test)]
    assert len(examples) == _RIGS


def _is_on_the_page(value):
    test = getattr(value, "__wrapped__", value)
    return getattr(getattr(test, "__code__", None), "co_filename", None) == str(_PAGE)
