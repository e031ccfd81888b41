"""What is done to the project rather than with it: `make lock`, `make sbom`."""
