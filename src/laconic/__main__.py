"""``python -m laconic``."""

import sys

from laconic.cli import main

sys.exit(main())
