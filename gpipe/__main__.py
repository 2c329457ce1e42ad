"""Makes `python -m gpipe` the command `gpipe`."""

import sys

from gpipe.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
