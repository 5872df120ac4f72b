"""Gets packages of fixed versions from the index of packages, by pip, once.

The environment that the tests run in stays as it is.
"""

import subprocess
import sys
import tarfile

import pytest

from tests.test_mpirun import ROOT

KEPT = ROOT / "build" / "packages"
# Python has the filter from 3.11.4 on.
_SAFELY = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
WITH_OURS = "--no-build-isolation"
"""Lets pip use the setuptools that is here: one for a source distribution alone took
minutes on a loaded machine."""


def source(name, version, *options, environ=None):
    """Return the folder of a package's source distribution, or skip.

    Args:
        name: the package.
        version: its version.
        options: more for pip, such as ``WITH_OURS``.
        environ: the environment of pip, which asks the package for its version.
    """
    folder = KEPT / f"{name.replace('-', '_')}-{version}"
    if not folder.exists():
        options = *options, "--no-binary", ":all:", "--dest", KEPT
        _pip("download", *options, f"{name}=={version}", environ=environ)
        for archive in KEPT.glob("*.tar.gz"):
            with tarfile.open(archive) as files:
                files.extractall(KEPT, **_SAFELY)
            archive.unlink()
    return folder


def installed(*wanted):
    """Return a folder with the wheels of packages, such as ``"pylops==2.8.0"``."""
    folder = KEPT / "_".join(wanted).replace("==", "-")
    if not folder.exists():
        _pip("install", "--only-binary", ":all:", "--target", folder, *wanted)
    return folder


def _pip(command, *options, environ=None):
    """Run pip without dependencies. Only the network has a deadline, pip's own."""
    KEPT.mkdir(parents=True, exist_ok=True)
    line = [sys.executable, "-m", "pip", command, "--no-deps"]
    line += ["--timeout", "30", "--retries", "3", *options]
    ended = subprocess.run(
        line, capture_output=True, text=True, check=False, env=environ
    )
    if ended.returncode:
        pytest.skip(f"{options[-1]} cannot be had: {ended.stderr[-300:]}")
