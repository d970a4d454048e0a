"""One rank: from a step's plan to its tokens, and the memory that takes."""
