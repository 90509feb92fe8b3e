"""The models: one file per architecture, named as the checkpoint's `model_type`."""
