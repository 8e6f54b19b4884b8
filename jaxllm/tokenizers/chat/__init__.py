"""Chat templates, rendered by Jinja in a sandbox.

Internal: `Tokenizer.apply_chat_template` renders them.
"""
