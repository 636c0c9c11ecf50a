"""`python -m care`: the `care` command where it is not installed as a script."""

import sys

from care.cli.main import main

sys.exit(main())
