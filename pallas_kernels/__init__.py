"""Device kernels in Pallas for Mosaic GPU; they do not import jaxfused."""
