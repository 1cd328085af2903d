"""Attention masks as objects; `jaxfused.masks` exports them."""
