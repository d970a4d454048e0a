"""GEMMs for NVIDIA GPUs: kernels, how long they take, and which one a model's weights get.

matrix.py is the way in. configs.py says what GEMMs there are, skinny.py, tiled.py and cublaslt.py
compute them, build.py makes one from a config. candidates.py lists those worth timing, measure.py
times them, table.py keeps what was chosen in files, choice.py decides. Importing a module of this
folder needs Triton.
"""
