"""Attention kernels on the device, against float64."""
