"""Acting for a topic's owner: how a job changes a topic that another process has open, or nobody.

    fence of the job ─┐
    topic's record ───┴─► OwnedTopic whose every change requires both

Owns: nothing; the rules are `ownership`'s. Does not own: local files, objects.

The topic's epoch does not rise, so its owner goes on, and what is committed here is committed
under the owner's epoch. A topic that changes hands meanwhile has another one: the change is
refused, and the job plans anew. A topic that nobody has open is changed in the name of its last
owner.
"""

from __future__ import annotations

from ister.clock import Clock
from ister.errors import NotFoundError
from ister.metrics import Metrics
from ister.tier.catalog import Catalog
from ister.tier.fence import Fence
from ister.tier.ownership import OwnedTopic

__all__ = ["act_outside"]


def act_outside(catalog: Catalog, fence: Fence, *, clock: Clock, metrics: Metrics) -> OwnedTopic:
    """The right to change a topic for as long as it does not change hands and the fence holds.

    Raises:
        NotFoundError: There is no such topic.
        UnavailableError: The metadata store does not answer.
    """
    found = catalog.record()
    topic = str(catalog.keys.topic)
    if found is None or not found[0].is_open:
        raise NotFoundError(f"there is no topic {topic}", topic=topic)
    record, revision = found
    return OwnedTopic(
        catalog,
        record=record,
        revision=revision,
        node=record.node,
        sealed=None,
        clock=clock,
        metrics=metrics,
        fence=fence,
    )
