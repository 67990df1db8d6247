"""`python -m examples.demo`, from the root of a checkout."""

import sys

from .main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
