"""One engine on one workload: the command of its driver and what that runs with. Starts nothing."""

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ("tessera", "vllm", "sglang")


@dataclass(frozen=True, slots=True)
class EngineJob:
    """config: a Hugging Face config.json. tp_size, ep_size: as of driver.Job. backend: Tessera's
    attention backend, None its choice."""

    engine: str
    config: Path
    workload: str
    repeats: int
    tp_size: int = 1
    backend: str | None = None
    ep_size: int = 1

    def command(self) -> list[str]:
        driver = (
            ["-m", "benchmarks.h200.run_tessera"]
            if self.engine == "tessera"
            else [str(Path(__file__).parent / "peers" / f"run_{self.engine}.py")]
        )
        command = [sys.executable, *driver, str(self.config.resolve())]
        command += ["--workload", self.workload, "--repeats", str(self.repeats)]
        command += ["--tp", str(self.tp_size), "--ep", str(self.ep_size)]
        if self.engine == "tessera" and self.backend is not None:
            command += ["--backend", self.backend]
        return command

    def environment(self, sites: Mapping[str, str]) -> dict[str, str]:
        """Tessera inherits ours. A peer sees its own packages only: sites has its PYTHONPATH."""
        inherited = os.environ.get("PYTHONPATH", "")
        path = f"{ROOT}:{inherited}" if self.engine == "tessera" else sites[self.engine]
        return {**os.environ, "PYTHONPATH": path}


def title_of(config: Path, tp_size: int, ep_size: int) -> str:
    """A model as logs and tables name it: on several GPUs with how these share it."""
    parts = [f"TP {tp_size}"] if tp_size > ep_size else []
    parts += [f"EP {ep_size}"] if ep_size > 1 else []
    return " ".join([config.stem, *parts])


def folder_of(engine: str) -> Path:
    """Where its driver runs: a peer must not find our packages there."""
    return ROOT if engine == "tessera" else Path(tempfile.gettempdir())
