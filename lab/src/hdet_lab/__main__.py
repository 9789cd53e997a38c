"""``python -m hdet_lab``, and ``torchrun -m hdet_lab train ...``."""

import sys

from hdet_lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
