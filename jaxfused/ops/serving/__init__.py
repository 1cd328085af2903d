"""Keys and values kept between calls: caches, pages, and attention to them."""
