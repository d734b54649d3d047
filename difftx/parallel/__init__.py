"""Device meshes, array sharding and the coordination of processes."""
