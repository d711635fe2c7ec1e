"""Layers and environments: content-addressed EROFS images, the catalog that names them, and what builds them."""
