"""Multimodal models, one file each: the fields of the text part, the vision tower and its projector."""
