"""OCI and Docker images as sources of layers and environments. docs/oci.md."""
