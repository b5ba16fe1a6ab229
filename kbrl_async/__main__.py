"""`python -m kbrl_async` is `kbrl`."""

import sys

from kbrl_async.cli import main

sys.exit(main())
