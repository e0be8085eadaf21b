"""`python -m ister`: the same as the command `ister`."""

import sys

from ister.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
