"""``python -m hdet``, and ``torchrun -m hdet train ...``."""

import sys

from hdet.cli import main

if __name__ == "__main__":
    sys.exit(main())
