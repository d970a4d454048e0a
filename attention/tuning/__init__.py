"""Which backend attends, by measurement: decision 0112."""
