"""The compose files and the image `cpu` in a Docker engine of the tests: `make test-containers`, not `make test`."""
