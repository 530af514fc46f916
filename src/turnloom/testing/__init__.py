"""Fakes and fixtures that are shipped: an engine that answers from a script, real tokenizers without a model hub."""
