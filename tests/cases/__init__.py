"""Small inputs that went wrong in real training programs, each with its right answer, through the public API."""
