"""Start workers: on this machine from one script."""
