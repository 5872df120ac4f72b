"""Whether tests run in full: `make nightly`, and not `make test`."""

import os

WHOLE = os.environ.get("NUMBA_SYMM_TEST_WHOLE") == "1"
