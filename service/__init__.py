"""Ray Serve application, protocols and observability around the engine."""
