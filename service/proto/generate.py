"""Regenerates the Python code of inference.proto: `python -m service.proto.generate [FOLDER]`.

Writes service/proto/inference_pb2.py, .pyi and _grpc.py below FOLDER, by default the source tree
itself. Needs the development dependency grpcio-tools; nothing at run time imports this file.
"""

import sys
from pathlib import Path

from grpc_tools import protoc

_SOURCE_ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("inference_pb2.py", "inference_pb2.pyi", "inference_pb2_grpc.py")


def generate(output_root: Path) -> None:
    """Raises RuntimeError if protoc refuses the file."""
    status = protoc.main(
        [
            "protoc",
            f"-I{_SOURCE_ROOT}",
            f"--python_out={output_root}",
            f"--pyi_out={output_root}",
            f"--grpc_python_out={output_root}",
            "service/proto/inference.proto",
        ]
    )
    if status != 0:
        raise RuntimeError(f"protoc ended with status {status}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else _SOURCE_ROOT)
