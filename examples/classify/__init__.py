"""Classifiers of images, by name: `python -m examples.classify.train --model convnext-t`."""
