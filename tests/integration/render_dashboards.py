"""Renders the chart's dashboards from a service under load, for docs/dashboards.md.

`pip install -e ".[docs]"`, then
`tests/integration/isolated.sh python -m tests.integration.render_dashboards`. Needs prometheus.
"""

import argparse
import math
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray import serve

from tests.integration.dashboard_drawing import draw_dashboard
from tests.integration.dashboard_load import MAX_CLIENTS, running_load, service_settings
from tests.integration.prometheus_server import running_prometheus
from tests.integration.services import running_service
from tests.integration.watched import Watched, watch
from tests.unit.dashboards.reading import read_dashboards

BASE_PORT = 18920
ADDRESS = "127.0.0.1:18929"
OBJECT_STORE_BYTES = 100 << 20
WAVE_S = 90.0
IMAGES = Path(__file__).parents[2] / "docs" / "images"


def clients_in_waves(elapsed_s: float) -> int:
    """From few to all and back, so that queues and batches have something to show."""
    height = 0.5 - 0.5 * math.cos(2 * math.pi * elapsed_s / WAVE_S)
    return round(3 + (MAX_CLIENTS - 3) * height)


def watch_a_service(seconds: float, folder: Path, images: Path) -> None:
    with (
        running_service("pictures", BASE_PORT, **service_settings(BASE_PORT)) as service,
        running_prometheus(folder, ADDRESS, service.metrics_url) as prometheus,
    ):
        start_s = time.time()
        with running_load(service, clients_in_waves):
            time.sleep(seconds)
        draw_all(watch(prometheus, start_s).until(time.time()), images)


def draw_all(seen: Watched, images: Path) -> None:
    images.mkdir(parents=True, exist_ok=True)
    for dashboard in read_dashboards():
        file = images / f"dashboard-{dashboard.file.stem}.png"
        draw_dashboard(dashboard, seen, file)
        print(file.name, file.stat().st_size // 1000, "kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--images", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    ray.init(
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        num_cpus=4,
    )
    serve.start(proxy_location="Disabled")
    with tempfile.TemporaryDirectory() as folder:
        watch_a_service(arguments.seconds, Path(folder), arguments.images)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
