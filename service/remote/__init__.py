"""Files that clients name by their address, from hosts that the operator allows."""
