"""Ingress: authenticates a request, finds its route, calls the edge or the images, and holds no state of any sandbox."""
