"""One thread of torch: its threads spin while they wait for each other, which costs more than the
small tensors of tests gain by them. Set before anything imports torch; subprocesses inherit it.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
