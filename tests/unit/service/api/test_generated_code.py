"""The committed protobuf code is what the proto file generates."""

from pathlib import Path

import service.proto
from service.proto.generate import GENERATED, generate


def test_generated_code_is_current(tmp_path):
    generate(tmp_path)
    committed = Path(service.proto.__file__).parent
    for name in GENERATED:
        fresh = (tmp_path / "service" / "proto" / name).read_bytes()
        assert fresh == (committed / name).read_bytes(), "run python -m service.proto.generate"
