"""A log in a process of its own that appends, and waits for the bucket, while others upload.

    python -m tests.integration.tier_child <ister.yml> <count> <topic>…

Appends `count` batches to each topic in turn, waits until all of them are tiered, and prints a line
of JSON: how many messages each topic has, and how many objects this process has made itself.
"""

import json
import sys
import threading

import ister

WAIT_SECONDS = 60


def main() -> None:
    config, count, *names = sys.argv[1:]
    with ister.open(config) as log:
        topics = [log.topic(name, create=True) for name in names]
        print("ready", flush=True)
        sys.stdin.readline()
        for number in range(int(count)):
            for topic in topics:
                topic.append_many([b"%d.%d" % (number, part) for part in range(5)])
                topic.flush()
            threading.Event().wait(0.05)
        for topic in topics:
            topic.wait(topic.watermarks.next - 1, "tiered", timeout=WAIT_SECONDS)
        made = log.metrics.snapshot().get("uploader.objects_created_total", 0)
        print(
            json.dumps({"next": [topic.watermarks.next for topic in topics], "made": made}),
            flush=True,
        )
        sys.stdin.readline()


if __name__ == "__main__":
    main()
