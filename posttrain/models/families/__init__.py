"""One file per Hugging Face `model_type`."""
