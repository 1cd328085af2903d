"""Masks of attention as objects, which `jaxfused.masks` lists."""
