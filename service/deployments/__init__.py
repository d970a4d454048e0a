"""The processes of the application: what Serve and Ray instantiate."""
