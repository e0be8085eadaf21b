"""Which queries may be divided into chunks, by what Spark says of them."""

import pytest

from ister.spark.jobs.replay_sql import is_row_by_row

VIEW = """\
+- SubqueryAlias messages
   +- View (`messages`, [offset#1L, payload#2, text#3])
      +- Project [offset#1L, payload#2, cast(payload#2 as string) AS text#3]
         +- MapInArrow _map_numbered(id#0L)#4, [offset#1L, payload#2], false
            +- Range (0, 4, step=1, splits=Some(4))"""


def explained(*nodes):
    """What `EXPLAIN EXTENDED` says, with nodes on top of the view."""
    lines = []
    for depth, node in enumerate(nodes):
        lines.append(f"{'   ' * (depth - 1)}+- {node}" if depth else node)
    pad = "   " * (len(nodes) - 1)
    lines += [pad + line for line in VIEW.splitlines()]
    plan = "\n".join(lines)
    return (
        "== Parsed Logical Plan ==\n'Project ['payload]\n\n"
        f"== Analyzed Logical Plan ==\npayload: string\n{plan}\n\n"
        "== Optimized Logical Plan ==\nProject [payload#2]\n\n== Physical Plan ==\nx\n"
    )


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (["Project [upper(text#3) AS payload#5]"], True),
        (
            ["Project [payload#2]", "Filter (offset#1L = cast(0 as bigint))"],
            True,
        ),
        (["Project [p#6]", "Generate explode(array(text#3, b)), false, [p#6]"], True),
        (["Aggregate [cast(count(1) as string) AS payload#5]"], False),
        (["GlobalLimit 3", "LocalLimit 3", "Project [payload#2]"], False),
        (["Sort [offset#1L ASC NULLS FIRST], true", "Project [payload#2]"], False),
        (["Project [rand(7) AS x#9, payload#2]"], False),
        (["Project [uuid(Some(7)) AS payload#9]"], False),
        (["Project [payload#2]", "Filter offset#1L IN (list#12 [])"], False),
        (["Project [scalar-subquery#8 [] AS payload#9]"], False),
        (["WithCTE", "Project [payload#2]"], False),
    ],
)
def test_query_is_row_by_row(nodes, expected):
    assert is_row_by_row(explained(*nodes)) is expected


def test_what_is_not_over_the_messages_is_no_query_by_message():
    plan = "Project [a AS payload#1]\n+- Range (0, 3, step=1, splits=None)"
    text = f"== Analyzed Logical Plan ==\npayload: string\n{plan}\n\n== Optimized Logical Plan ==\n"
    assert not is_row_by_row(text)
    assert not is_row_by_row("")
