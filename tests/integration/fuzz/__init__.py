"""The real service under nonsense of every kind for as long as one likes, and what it answered."""
