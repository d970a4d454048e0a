"""Integration tests run beside each other in one network: no two of their files have a port."""

import itertools
import re
from pathlib import Path

INTEGRATION = Path(__file__).parents[2] / "integration"
# A service has three from its first one on.
NUM_PORTS = 3
_PORT = re.compile(r"\b1[89]\d{3}\b")


def ports_of(path: Path) -> set[int]:
    named = {int(port) for port in _PORT.findall(path.read_text())}
    return {port + index for port in named for index in range(NUM_PORTS)}


PORTS = {str(path.relative_to(INTEGRATION)): ports_of(path) for path in INTEGRATION.rglob("*.py")}


def test_no_two_files_have_a_port():
    pairs = itertools.combinations(PORTS, 2)
    shared = {pair: PORTS[pair[0]] & PORTS[pair[1]] for pair in pairs}
    assert {pair: ports for pair, ports in shared.items() if ports} == {}


def test_services_have_ports_to_look_at():
    assert {"test_service.py", "test_tls.py", "chart_haproxy.py"} <= {
        name for name, ports in PORTS.items() if ports
    }
