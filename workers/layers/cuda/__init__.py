"""Fused layers for NVIDIA GPUs, in Triton. Importing a module of this folder needs Triton.

Nothing on a CPU imports them: workers/models/registry.py decides by the device.
"""
