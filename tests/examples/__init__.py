"""Every document and every example runs."""
