"""Real power cuts: ext4 on a loop device is stopped in the middle of a load, and mounted again.

The shutdown throws away the page cache and the journal that has not been written, as a power cut
does. Only what was synced is promised: acknowledgements at `synced` have to hold, those at
`written` may be gone.
"""

import json
import random
import time

import pytest

import ister
from tests.support.disks import Disk, mounted_disk, skip_if, why_no_disks
from tests.support.oracle import SURVIVES_POWER_CUT, History, payload_of, settings_of, verify
from tests.support.scale import scaled
from tests.support.writer_child import WriterChild, new_seed, say_replay

pytestmark = pytest.mark.nightly

CUTS = scaled(5, 100)
CANARY_CUTS_MAX = 10


def cut_under_load(disk: Disk, history: History, chance: random.Random, **options) -> None:
    """Lets a writer work for a while, cuts the power, and mounts the disk again."""
    with WriterChild(disk.where, history, **options) as child:
        if chance.random() < 0.8:
            is_ready = child.listen(20.0, until="ready")
            assert is_ready, f"it did not start: {child.kill()} {child.complaints()}"
            child.listen(chance.uniform(0.02, 0.12))
        else:
            # About when it opens its topics, which makes or recovers them.
            child.listen(chance.uniform(0.12, 0.25))
        child.drain()
        disk.cut_power()
        child.kill()
    disk.unmount()
    disk.mount()


def check_and_append(disk: Disk, history: History, level: str, session: str) -> None:
    """Opens the log in this process: what was synced is there, and it goes on."""
    with ister.open(settings_of(str(disk.where), level=level)) as log:
        verify(history, log, survives=SURVIVES_POWER_CUT)
        for name in log.topics():
            topic = log.topic(name)
            message_id = f"{session}.0"
            history.send(name, message_id)
            offset = topic.append(payload_of(message_id))
            topic.wait(offset, "synced")
            history.ack(name, message_id, offset, "synced")


@pytest.mark.timeout(60 + 5 * CUTS)
@pytest.mark.parametrize("level", ["synced", "mixed"])
def test_power_cut_keeps_what_was_synced(request, level):
    """Goal: every message acknowledged at `synced` is there after a power cut, wherever it hits.

    Method: a writer with rotation and trimming on an ext4 of its own, cut after 20 to 120 ms;
    the disk is mounted again and the log opened and compared with every acknowledgement since the
    first cut. One cut in five comes while the writer opens its topics, and after one in five
    nobody looks before the next writer has recovered the log.
    """
    skip_if(why_no_disks())
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    chance = random.Random(f"{seed}/{level}")
    history = History()
    started = time.monotonic()
    with mounted_disk() as disk:
        for cut in range(CUTS // 2 if level == "mixed" else CUTS - CUTS // 2):
            cut_under_load(
                disk,
                history,
                chance,
                level=level,
                session=f"c{cut}",
                seed=seed,
                trim_keep=300,
                rotate_bytes=chance.choice([4096, 16384, 1 << 20]),
            )
            if chance.random() < 0.8:
                check_and_append(disk, history, level, f"p{cut}")
        check_and_append(disk, history, level, "end")
    print(
        json.dumps(
            {
                "test": "power cuts, ext4",
                "level": level,
                "seed": seed,
                "cuts": cut + 1,
                "acked": history.acks,
                "sent": history.sends,
                "lost": 0,
                "seconds": round(time.monotonic() - started, 1),
            }
        )
    )
    assert history.acks > 10 * (cut + 1), "hardly anything was acknowledged"


@pytest.mark.timeout(120)
def test_product_without_sync_is_caught(request):
    """Goal: the harness above can fail: a product whose syncs do nothing is found out.

    Method: the same load and cuts, with the writer's file sync taken out and large files (a
    rotation's directory sync would bring data along), until the oracle complains.
    """
    skip_if(why_no_disks())
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    chance = random.Random(seed)
    for cut in range(CANARY_CUTS_MAX):
        history = History()
        with mounted_disk() as disk:
            options = {"rotate_bytes": 1 << 26, "session": "c", "seed": seed}
            cut_under_load(disk, history, chance, **options, **{"break": "sync"})
            try:
                check_and_append(disk, history, "synced", "p")
            except AssertionError as caught:
                print(json.dumps({"test": "canary without sync", "cuts": cut + 1, "seed": seed}))
                print(caught)
                assert any(word in str(caught) for word in ("lost", "changed"))
                return
    pytest.fail(f"{CANARY_CUTS_MAX} cuts and no loss seen: the harness proves nothing")
