"""One communicator for all tests of a file: each call follows many others."""

from tests.conftest import comm_of_a_file as comm  # noqa: F401
