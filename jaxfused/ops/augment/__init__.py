"""One pass over images: a resampling, pointwise steps and their statistics."""
