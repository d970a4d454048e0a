"""The programs that tests run, and the count of what was skipped for want of them."""
