"""Products with weights that stay as a checkpoint stores them, on NVIDIA GPUs from sm90 on.

products.py is the way in. workers/layers/kept says what weights there are; of each there is one
kernel for few rows, where a product's time is that of reading its weights, and another way for
many. Importing a module of this folder needs Triton.
"""
