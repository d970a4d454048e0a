"""Unit tests of workers/scheduler, with a runner that distrusts its plans."""
