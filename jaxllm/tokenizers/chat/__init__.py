"""Chat templates, rendered by Jinja in a sandbox."""
