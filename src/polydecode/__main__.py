"""`python -m polydecode` and the console script."""

import sys

from polydecode.cli import main

if __name__ == "__main__":
    sys.exit(main())
