"""Properties checked on random inputs."""
