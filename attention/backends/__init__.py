"""Attention backends, one file each. A backend knows a geometry and two pools, nothing above."""
