"""How many engine replicas a model has, decided by its load; and waiting while it has none."""
