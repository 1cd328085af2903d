"""Device kernels in Pallas for Mosaic GPU; they know nothing of jaxfused."""
