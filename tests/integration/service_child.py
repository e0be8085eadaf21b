"""`ister pipeline run` in a process of its own, to be killed."""

import argparse
import sys

from ister.cli.pipeline import run

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    run.register(parser.add_subparsers())
    options = parser.parse_args(["run", *sys.argv[1:]])
    sys.exit(options.run(options))
