"""Keys and values that are kept between calls: caches, pages, and attention over them."""
