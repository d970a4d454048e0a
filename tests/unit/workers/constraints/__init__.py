"""Tests, as packages so that helpers can be imported and file names may repeat."""
