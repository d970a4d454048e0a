"""Deploy files and their documentation."""
