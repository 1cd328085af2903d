"""Language models on the fused layers of jaxfused: checkpoints, training, generation, a server."""
