"""The chart's dashboards and rules: readable, consistent, and only of metrics that exist."""
