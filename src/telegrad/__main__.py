"""`python -m telegrad` is the `telegrad` command."""

import sys

from telegrad.cli import main

if __name__ == "__main__":
    sys.exit(main())
