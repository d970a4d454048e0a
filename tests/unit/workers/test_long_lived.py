"""What a start made is no work of the garbage collector's any more."""

import subprocess
import sys

PROGRAM = """
import gc

from workers.long_lived import settle

made = [[n] for n in range(50_000)]
gc.collect()
before = len(gc.get_objects())
settle()
after = len(gc.get_objects())
assert before > 50_000 > 5_000 > after, (before, after)
assert len(made) == 50_000
"""


def test_it_is_not_looked_at_again():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
