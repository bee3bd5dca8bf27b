"""`python -m telegrad.compat SCRIPT ...` is `telegrad compat SCRIPT ...`."""

import sys

from telegrad.compat.startup import run_script

if __name__ == "__main__":
    sys.exit(run_script(sys.argv[1:]))
