"""``help`` shows the same texts for the simulator's functions as for a GPU's."""

from tests.host.test_docstrings import *  # noqa: F403
