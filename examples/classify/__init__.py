"""Trains classifiers of images: `python -m examples.classify.train --model convnext-t`."""
