"""`tessera bench --profile` for shapes without weights, where the service's packages are missing.

python3 -m benchmarks.h200.profile_steps benchmarks/h200/models/llama-3.1-8b.json
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from rich.console import Console

from service.bench.profile.report import print_profile
from service.bench.profile.session import ProfilePlan, ProfileSession
from workers.config import EngineConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path, help="a Hugging Face config.json")
    parser.add_argument("--backend", default=None, help="attention backend, default automatic")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(arguments.config, Path(folder) / "config.json")
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            max_context_len=8192,
            attention_backend=arguments.backend,
            enable_prefix_cache=False,
        )
        session = ProfileSession(config, ProfilePlan(), None)
    print_profile(session.phases(), Console(width=110))
    session.close()


if __name__ == "__main__":
    main()
