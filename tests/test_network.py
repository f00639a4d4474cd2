"""The package and its tests speak with no other machine: conftest.py forbids it to every test. Importing does not either."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests import network

IMPORTS = """
import importlib, pkgutil, sys

def forbid(event, args):
    if event.startswith("socket.") and event != "socket.gethostname":
        raise SystemExit(f"{event} {args}")

sys.addaudithook(forbid)
import clearhead
for module in pkgutil.walk_packages(clearhead.__path__, "clearhead."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:  # of a package that is not needed, such as triton
            assert not error.name.startswith("clearhead"), error
print("imported", len([name for name in sys.modules if name.startswith("clearhead")]))
"""


@pytest.mark.slow
def test_no_module_opens_a_connection_when_it_is_imported() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout.split()[-1]) > 200


@pytest.mark.parametrize(
    "reach",
    [
        lambda one: one.connect(("192.0.2.1", 80)),
        lambda one: one.connect_ex(("192.0.2.1", 80)),
        lambda one: one.sendto(b"x", ("192.0.2.1", 53)),
        lambda one: socket.getaddrinfo("example.org", 443),
    ],
)
def test_a_test_can_not_reach_another_machine(reach: Callable[[socket.socket], object]) -> None:
    refused = pytest.raises(network.NetworkError, match=r"192\.0\.2\.1|example\.org")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one, refused:
        reach(one)
    assert len(network.reached) == 1  # noticed also where somebody swallows the error
    network.reached.clear()


def test_this_machine_can_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        assert network.reached == []
